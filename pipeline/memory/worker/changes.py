"""The cheapest changes of a recipe that make its training fit into a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.memory.job import Change
from pipeline.trained_lora.worker.memory.resident_blocks import most_resident

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.trained_lora.worker.memory.training import TrainingForecast, Variant


AUTO = "training.offload: auto"
"""The change that streams as many blocks as necessary. It needs at least as much memory as `offload: 0`."""


def cheapest_change(training: TrainingForecast, recipe: Recipe, usable_bytes: int) -> Change:
    """Return the first changes, by ascending cost, that make training fit, or else need least memory."""
    least = Change((), training.memory(training.variant).device, fits=False)
    for settings, variant in _changes(recipe, training.variant):
        device_bytes = training.memory(variant).device
        if device_bytes <= usable_bytes:
            if AUTO in settings:
                # Auto keeps as many blocks on the GPU as fit, which takes more memory than the variant with
                # none.
                device_bytes = most_resident(training, variant, usable_bytes)[1]
            return Change(settings, device_bytes, fits=True)
        if device_bytes < least.device_bytes:
            least = Change(settings, device_bytes, fits=False)
    return least


def _changes(recipe: Recipe, variant: Variant) -> Iterator[tuple[tuple[str, ...], Variant]]:
    """Yield changed settings with all changes before them."""
    settings: tuple[str, ...] = ()
    if variant.mixed_precision == "no":
        settings += ("accelerate.mixed_precision: bf16",)
        variant = replace(variant, mixed_precision="bf16")
        yield settings, variant

    # It costs time, but trains the same weights.
    if not variant.checkpointing:
        settings += ("training.gradient_checkpointing: true",)
        variant = replace(variant, checkpointing=True)
        yield settings, variant

    # A smaller batch with more accumulation trains the same samples per step.
    if variant.batch_size > 1:
        accumulation = recipe.training.gradient_accumulation * variant.batch_size
        settings += ("training.batch_size: 1", f"training.gradient_accumulation: {accumulation}")
        variant = replace(variant, batch_size=1)
        yield settings, variant

    # A recipe with sharding can have neither streaming nor packed weights.
    if recipe.accelerate.shard:
        return
    # Streaming trains the same weights, and its copies overlap with computation: docs/hardware.md lists the
    # computed times.
    if variant.offload != 0 and recipe.training.offload != "auto":
        settings += (AUTO,)
        variant = replace(variant, offload=0)
        yield settings, variant

    # Packing comes last: it changes the trained weights slightly, and unpacks weights before each product.
    if variant.quantize == "none" and recipe.training.lora.allows_packed_weights:
        # The two packings are alternatives, so neither contains the other.
        for kind in ("int8", "nf4"):
            yield (*settings, f"training.quantize: {kind}"), replace(variant, quantize=kind)
