"""Computed times of a recipe's training step and of its latents on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pipeline.memory.job import ComputedTimes
from pipeline.memory.worker.operations import latent_work, step_work
from pipeline.trained_lora.worker.sharding import may_need_base_prediction

if TYPE_CHECKING:
    from pipeline.images.geometry import Size
    from pipeline.memory.gpus import Gpu
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import Recipe
    from pipeline.trained_lora.worker.memory.training import TrainingForecast, Variant


def computed_times(
    family: WorkerFamily,
    recipe: Recipe,
    training: TrainingForecast,
    size: Size,
    gpu: Gpu,
    *,
    offload: Literal["none"] | int,
) -> ComputedTimes:
    """Return the times of a recipe on a GPU, for images of one size.

    `training` is the recipe's forecast for images of this size, and `offload` the resolved value of
    `training.offload`.
    """
    dtype = family.vae_compute_dtype(recipe.latents.compute_dtype)
    # A VAE encodes several images at a time, so that starting kernels takes no time of its own.
    latent_s = gpu.computing_s(latent_work(family, size, dtype), float32=dtype == "float32")

    step_s, not_counted = None, _not_counted(recipe, training.variant, offload)
    if not not_counted:
        micro_batch_s = gpu.seconds(step_work(training, training.variant))
        step_s = recipe.training.gradient_accumulation * micro_batch_s
    return ComputedTimes(gpu.name, size.height, size.width, latent_s, step_s, not_counted)


def _not_counted(recipe: Recipe, variant: Variant, offload: Literal["none"] | int) -> str:
    """Return the first setting that changes the work of a step in a way that is not counted."""
    training = recipe.training
    reasons = {
        # The comparison with published times has no training in float32.
        "accelerate.mixed_precision: no": variant.mixed_precision == "no",
        f"training.quantize: {training.quantize}": training.quantize != "none",
        f"training.compute: {training.compute}": training.compute != "none",
        f"training.offload: {training.offload}": offload != "none",
        # auto compiles if the machine of the training can.
        f"training.compile: {str(training.compile).lower()}": training.compile is not False,
        f"training.attention_backend: {training.attention_backend}": training.attention_backend != "native",
        "accelerate.shard: true": recipe.accelerate.shard,
        # These run the base model too.
        "masks or priors with the base model's prediction": may_need_base_prediction(recipe),
    }
    return next((setting for setting, changes_work in reasons.items() if changes_work), "")
