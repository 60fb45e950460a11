"""Helper that reads an adapter's weights for comparisons."""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.trained_lora.worker.adapter import lora


def delta_weights(network: nn.Module, adapter: str = "default") -> dict[str, Tensor]:
    """Return the delta weight of each adapted module by module name."""
    return {name: compute() for name, compute in lora.delta_weights(network, adapter).items()}
