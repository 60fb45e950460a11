"""Memory of the previews that a training draws: the denoiser's passes, then the VAE's decoder in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeline.images.geometry import Size
from pipeline.trained_lora.worker.memory.cuda_rules import CudaRules
from pipeline.trained_lora.worker.memory.live_memory import LiveMemory
from pipeline.trained_lora.worker.memory.skeletons import num_bytes, skeleton, tensors_of

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import Recipe
    from pipeline.trained_lora.worker.memory.training import TrainingForecast, Variant

_GUIDED = 2
"""Number of predictions that a pass may compute at a time: with the prompt, and without it for guidance."""


def previews_bytes(
    family: WorkerFamily, recipe: Recipe, training: TrainingForecast, variant: Variant, bucket: Size
) -> tuple[int, int]:
    """Return (bytes of the VAE, peak bytes on the GPU) while the recipe's previews are drawn.

    `bucket` is the recipe's largest. The base model, the adapter and the optimizer's state stay on the GPU.
    """
    size = preview_size(recipe, bucket)
    vae = skeleton(family, "vae", "float32")
    memory = LiveMemory(without=tensors_of(vae))
    with memory, CudaRules(None, count=memory.count):
        family.vae.decode(vae, torch.empty(1, *family.latent_shape(size), device="meta"))

    # The passes have ended when the decoder starts.
    drawing = max(training.inference_bytes(variant, size, _GUIDED), memory.peak_bytes)
    kept, weights = training.memory(variant), num_bytes(tensors_of(vae))
    return weights, kept.base + kept.trained + weights + drawing


def preview_size(recipe: Recipe, bucket: Size) -> Size:
    """Return the size of the recipe's largest preview; the ones without a size have at most a bucket's."""
    sizes = [
        Size(each.height, each.width)
        for each in recipe.preview_prompts
        if each.height is not None and each.width is not None
    ]
    has_default = len(sizes) < len(recipe.preview_prompts) or not recipe.preview_prompts
    return max([*sizes, *([bucket] if has_default else [])], key=lambda size: size.height * size.width)
