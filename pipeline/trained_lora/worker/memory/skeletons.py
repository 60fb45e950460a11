"""Components of a base model on the meta device, created from their configuration files alone."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeline.models.worker.loading import component_class, drop_unused_parts

if TYPE_CHECKING:
    from pipeline.models.families import Family


def skeleton(family: Family, role: str, dtype: str) -> nn.Module:
    """Return a component, such as "vae", on the meta device, frozen and in evaluation mode.

    `dtype` is "float16", "bfloat16" or "float32".
    """
    kind, config = component_class(family, role), family.model.config(role)
    with torch.device("meta"), _default_dtype(getattr(torch, dtype)):
        if hasattr(kind, "from_config"):
            network = kind.from_config(config)
        else:
            # Classes of transformers have no `from_config`.
            network = kind(kind.config_class.from_dict(config))
    return network.to(getattr(torch, dtype)).requires_grad_(False).eval()


def text_encoder_skeleton(family: Family, role: str, dtype: str) -> nn.Module:
    """Return a text encoder as `skeleton`, without the parts that it does not use."""
    network = skeleton(family, role, dtype)
    drop_unused_parts(network, sees_images=family.text_images is not None)
    return network


def tensors_of(network: nn.Module) -> list[Tensor]:
    """Return the weights and buffers of a network."""
    return [*network.parameters(), *network.buffers()]


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of tensors in bytes."""
    return sum(tensor.nbytes for tensor in tensors)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    before: Any = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
