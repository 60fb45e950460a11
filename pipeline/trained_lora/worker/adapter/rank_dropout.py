"""Rank dropout and module dropout of a LoRA, as sd-scripts defines them.

Both act in training steps only, on the adapter's part of a layer's output (`LoRAModule.forward` in
networks/lora.py of https://github.com/kohya-ss/sd-scripts).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from pipeline.recipe import LoraSettings


def add_dropouts(layer: Any, adapter: str, settings: LoraSettings) -> None:
    """Add the dropouts of the settings to a layer of peft; without any, nothing is added."""
    # Hooks, because peft's LoRA has a dropout of its inputs only. Nothing is drawn from torch's generator if
    # a rate is 0, so that other recipes train as without these settings.
    if settings.rank_dropout > 0.0:
        layer.lora_A[adapter].register_forward_hook(partial(_drop_ranks, rate=settings.rank_dropout))
    if settings.module_dropout > 0.0:
        layer.lora_B[adapter].register_forward_hook(partial(_drop_module, rate=settings.module_dropout))


def _drop_ranks(module: nn.Module, _inputs: Any, hidden: Tensor, *, rate: float) -> Tensor | None:
    """Drop ranks of each sample with a probability of `rate`, and divide the remaining ones by 1 - rate.

    `hidden` is the output of the down matrix, (B, ..., rank), or (B, rank, h, w) of a convolution.
    """
    if not module.training:
        return None
    dim = 1 if isinstance(module, nn.Conv2d) else hidden.ndim - 1
    shape = [hidden.shape[each] if each in (0, dim) else 1 for each in range(hidden.ndim)]
    is_kept = torch.rand(shape, device=hidden.device) >= rate
    return hidden * is_kept / (1.0 - rate)


def _drop_module(module: nn.Module, _inputs: Any, output: Tensor, *, rate: float) -> Tensor | None:
    """Drop the adapter of a layer for a complete forward pass with a probability of `rate`."""
    if not module.training:
        return None
    # Multiplied instead of skipped, so that each process of a training computes all gradients.
    return output * (torch.rand((), device=output.device) >= rate)
