"""The cheapest changes of a recipe that make its training fit into a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.maintenance.memory.job import Change

if TYPE_CHECKING:
    from pipeline.maintenance.memory.worker.training import TrainingForecast, Variant
    from pipeline.recipe import Recipe


def cheapest_change(training: TrainingForecast, recipe: Recipe, usable_bytes: int) -> Change:
    """Return the first changes, in the order of their cost, that make training fit.

    If nothing does, return the changes that need least memory.
    """
    least = Change((), training.memory(training.variant).device, fits=False)
    for settings, variant in _changes(recipe, training.variant):
        device_bytes = training.memory(variant).device
        if device_bytes <= usable_bytes:
            return Change(settings, device_bytes, fits=True)
        if device_bytes < least.device_bytes:
            least = Change(settings, device_bytes, fits=False)
    return least


def _changes(recipe: Recipe, variant: Variant) -> Iterator[tuple[tuple[str, ...], Variant]]:
    """Yield changed settings, each with those before it, except that nf4 and streaming replace those before.

    Checkpointing costs time. A smaller batch with more accumulation trains the same samples per step. Packing
    changes the trained weights slightly. Streaming does not, but copies the weights in every step.
    """
    settings: tuple[str, ...] = ()
    if variant.mixed_precision == "no":
        settings += ("accelerate.mixed_precision: bf16",)
        variant = replace(variant, mixed_precision="bf16")
        yield settings, variant
    if not variant.checkpointing:
        settings += ("training.gradient_checkpointing: true",)
        variant = replace(variant, checkpointing=True)
        yield settings, variant
    if variant.batch_size > 1:
        accumulation = recipe.training.gradient_accumulation * variant.batch_size
        settings += ("training.batch_size: 1", f"training.gradient_accumulation: {accumulation}")
        variant = replace(variant, batch_size=1)
        yield settings, variant
    if variant.quantize == "none" and _can_pack(recipe):
        for kind in ("int8", "nf4"):
            yield (*settings, f"training.quantize: {kind}"), replace(variant, quantize=kind)
    if variant.offload != 0 and not recipe.training.compile:
        yield (*settings, "training.offload: 0"), replace(variant, offload=0)


def _can_pack(recipe: Recipe) -> bool:
    lora = recipe.training.lora
    return lora.kind == "lora" and not lora.dora and not lora.starts_from_base_weights
