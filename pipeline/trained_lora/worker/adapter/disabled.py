"""Run a model as if it had no adapters."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from pipeline.trained_lora.worker.adapter.svd_init import at_initial_weights


@contextmanager
def adapters_disabled(
    denoiser: nn.Module, text_networks: Mapping[str, nn.Module], *, reset_denoiser: bool
) -> Generator[None]:
    """Remove the effect of all adapters within the context.

    With `reset_denoiser`, for an adapter initialised from the base weights, the denoiser's is reset to its
    initial weights instead of being disabled. The frozen adapter then cancels it with the same arithmetic as
    at the start of training, so that rounding does not count as change.
    """
    disabled: list[Any] = [*text_networks.values()]
    if not reset_denoiser:
        disabled.append(denoiser)
    with at_initial_weights(denoiser) if reset_denoiser else nullcontext():
        for network in disabled:
            network.disable_adapters()
        try:
            yield
        finally:
            for network in disabled:
                network.enable_adapters()
