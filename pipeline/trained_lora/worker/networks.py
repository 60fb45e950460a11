"""The networks that have adapters: the denoiser, and where they are trained too, the text encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

from torch import Tensor, nn

from pipeline.trained_lora.worker.adapter.lora import load_adapter_state

T = TypeVar("T")

Networks: TypeAlias = Mapping[str, nn.Module]
"""By what stands before the paths of their modules: nothing for the denoiser, which comes first, and the
component's name and a dot for a text encoder."""


def networks_of(denoiser: nn.Module, text_encoders: Mapping[str, nn.Module]) -> Networks:
    """The denoiser and the text encoders, these by component."""
    return {"": denoiser, **{f"{role}.": encoder for role, encoder in text_encoders.items()}}


def of_all(networks: Networks, ask: Callable[[nn.Module], Mapping[str, T]]) -> dict[str, T]:
    """What `ask` says of each network, by names that say which; a name begins with that of a module."""
    return {
        f"{prefix}{name}": value
        for prefix, network in networks.items()
        for name, value in ask(network).items()
    }


def load_all(networks: Networks, state: Mapping[str, Tensor]) -> None:
    """Put back what `of_all` gave of `adapter_state`.

    Raises:
        TrainingError: A weight is missing, unknown, or of another shape.
    """
    others = tuple(prefix for prefix in networks if prefix)
    for prefix, network in networks.items():
        own = {
            name.removeprefix(prefix): weight
            for name, weight in state.items()
            if (name.startswith(prefix) if prefix else not name.startswith(others))
        }
        load_adapter_state(network, own)
