"""The trained weights in groups of one learning rate each, as torch's optimizers take them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from pipeline.recipe import TrainingSettings
    from pipeline.trained_lora.worker.adapter.lora import Networks

_ADAPTER_WEIGHT = re.compile(r"\.(lora|hada|lokr)_")
"""Where the path of a module ends in the name of one of its adapter's weights."""

_UP_MATRIX = ".lora_B."


def weight_groups(networks: Networks, settings: TrainingSettings) -> list[dict[str, Any]]:
    """Return torch's parameter groups: those of the denoiser, then those of the text encoders.

    In both, the weights without a learning rate of their own come first. Groups of `training.learning_rate`
    have no `lr`.
    """
    text = settings.lora.text_encoders
    text_networks = [network for prefix, network in networks.items() if prefix]
    return [
        *_groups([networks[""]], settings, None, is_text=False),
        *_groups(text_networks, settings, text and text.learning_rate, is_text=True),
    ]


def _groups(
    networks: list[nn.Module], settings: TrainingSettings, default: float | None, *, is_text: bool
) -> Iterator[dict[str, Any]]:
    """Yield the groups of some networks; None stands for `training.learning_rate`."""
    weights: dict[float | None, list[nn.Parameter]] = {default: []}
    for network in networks:
        for name, weight in network.named_parameters():
            if weight.requires_grad:
                module = _ADAPTER_WEIGHT.split(name)[0]
                own_rate = None if is_text else settings.lora.learning_rate_of(module)
                rate = default if own_rate is None else own_rate
                if settings.lora.loraplus_ratio is not None and _UP_MATRIX in name:
                    rate = (rate or settings.learning_rate) * settings.lora.loraplus_ratio
                weights.setdefault(rate, []).append(weight)
    for rate, group in weights.items():
        if group:
            yield {"params": group} if rate is None else {"params": group, "lr": rate}
