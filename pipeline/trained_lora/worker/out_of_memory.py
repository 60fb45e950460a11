"""The error for training that does not fit into memory, with advice that depends on the recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors import TrainingError

if TYPE_CHECKING:
    from pipeline.recipe import Recipe


def out_of_memory_error(recipe: Recipe, when: str, usage: str) -> TrainingError:
    """Return the error for memory that ran out, with the settings that the recipe can still change.

    `when` is a phrase such as "in step 3". `usage` describes the memory in use and may be empty.
    """
    training = recipe.training
    where = (
        f"training.batch_size {training.batch_size}, buckets.resolution {recipe.buckets.resolution}, "
        f"accelerate.mixed_precision {recipe.accelerate.mixed_precision}, "
        f"training.quantize {training.quantize}, training.offload {training.offload}, "
        f"training.gradient_checkpointing {str(training.gradient_checkpointing).lower()}"
    )
    what = f"memory ran out {when}" + (f" ({usage})" if usage else "")
    fix = "; ".join(_advice(recipe)) + ". A run with a checkpoint resumes from it"
    return TrainingError(what, where=where, fix=fix)


def _advice(recipe: Recipe) -> list[str]:
    """Return the changes that save memory, cheapest first, without those that the recipe already makes."""
    training = recipe.training
    advice: list[str] = []
    # First, because quantised weights save memory only together with it.
    if not training.gradient_checkpointing:
        advice.append("set training.gradient_checkpointing: true")
    if recipe.accelerate.mixed_precision == "no":
        advice.append("set accelerate.mixed_precision: bf16 if the GPU supports it")
    if training.batch_size > 1:
        # More accumulation keeps the number of samples per optimizer step.
        size = training.batch_size // 2
        accumulation = training.gradient_accumulation * -(-training.batch_size // size)
        advice.append(f"set training.batch_size: {size} and gradient_accumulation: {accumulation}")
    if training.quantize == "none" and training.lora.kind == "lora" and not training.lora.dora:
        advice.append("set training.quantize: int8 or nf4")
    if training.offload != 0 and not training.compile:
        advice.append(
            "set training.offload: 0, which copies the base model's blocks from the host for each use"
        )
    return [
        *advice,
        "close other programs that use the device",
        "lower buckets.resolution or training.lora.rank",
    ]
