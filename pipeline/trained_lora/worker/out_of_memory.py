"""What to change in a recipe whose training does not fit into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors import TrainingError

if TYPE_CHECKING:
    from pipeline.recipe import Recipe


def out_of_memory_error(recipe: Recipe, when: str, seen: str) -> TrainingError:
    """The error for memory that ran out; its advice is what the recipe does not do yet, cheapest first.

    Args:
        recipe: Of the training.
        when: "in step 3".
        seen: What is known of the memory's use; may be empty.
    """
    training, precision = recipe.training, recipe.accelerate.mixed_precision
    where = (
        f"training.batch_size {training.batch_size}, buckets.resolution {recipe.buckets.resolution}, "
        f"accelerate.mixed_precision {precision}, training.quantize {training.quantize}, "
        f"training.gradient_checkpointing {str(training.gradient_checkpointing).lower()}"
    )
    advice = "; ".join(_advice(recipe))
    what = f"memory ran out {when}" + (f" ({seen})" if seen else "")
    return TrainingError(what, where=where, fix=f"{advice}. What is kept of the run is gone on from")


def _advice(recipe: Recipe) -> list[str]:
    training = recipe.training
    advice: list[str] = []
    if recipe.accelerate.mixed_precision == "no":
        advice.append("set accelerate.mixed_precision: bf16, where the GPU can")
    if not training.gradient_checkpointing:
        advice.append("set training.gradient_checkpointing: true")
    if training.batch_size > 1:
        size = training.batch_size // 2
        times = training.gradient_accumulation * -(-training.batch_size // size)
        advice.append(f"set training.batch_size: {size} and gradient_accumulation: {times}")
    if training.quantize == "none" and training.lora.kind == "lora" and not training.lora.dora:
        advice.append("set training.quantize: int8_torchao or nf4")
    return [*advice, "free the device of other programs", "lower buckets.resolution or training.lora.rank"]
