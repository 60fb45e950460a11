"""The context LoRA: a frozen LoRA that is part of the base model wherever the recipe uses it.

Training, validation, previews and the pictures of `sample` and `evaluate` all see it, and exported files do
not contain it. So a LoRA of a character can be trained to fit a LoRA of a style.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from pipeline.trained_lora.context_file import refused_context
from pipeline.trained_lora.worker.base_model import base_dtype, load_base
from pipeline.trained_lora.worker.frozen_lora import FrozenLora, frozen_weights

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import Recipe


def load_base_with_context(family: WorkerFamily, recipe: Recipe, device: str) -> nn.Module:
    """Load the denoiser as `load_base` does, and add the recipe's context LoRA to it for good.

    Raises:
        TrainingError: See `load_base`, or the file is not a LoRA of this denoiser.
    """
    denoiser, context = load_base(family, recipe, device), recipe.model.context_lora
    if context is not None:
        # Before any other adapter is added: peft then calls the layers that have the hooks.
        weights = frozen_weights(context.path, family, denoiser, refused_context)
        dtype = getattr(torch, base_dtype(family, recipe))
        FrozenLora(denoiser, weights, dtype, scale=context.scale).active = True
    return denoiser
