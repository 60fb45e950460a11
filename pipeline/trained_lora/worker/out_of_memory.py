"""The error for training that does not fit into memory, with advice that depends on the recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors import TrainingError
from pipeline.recipe.training import shard_violations

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.recipe import Recipe
    from pipeline.trained_lora.worker.memory.resident_blocks import ResidentBlocks


def out_of_memory_error(
    recipe: Recipe, when: str, usage: str, *, resident: ResidentBlocks | None = None
) -> TrainingError:
    """Return the error for memory that ran out, with the settings that the recipe can still change.

    `when` is a phrase such as "in step 3". `usage` describes the memory in use and may be empty. `resident`
    is the resolved value of `training.offload: auto`, once it is decided.
    """
    training = recipe.training
    where = (
        f"training.batch_size {training.batch_size}, buckets.resolution {max(recipe.budgets)}, "
        f"accelerate.mixed_precision {recipe.accelerate.mixed_precision}, "
        f"training.quantize {training.quantize}, training.compute {training.compute}, "
        f"training.offload {training.offload}, "
        f"training.gradient_checkpointing {str(training.gradient_checkpointing).lower()}"
    )
    what = f"memory ran out {when}" + (f" ({usage})" if usage else "")
    resolved = recipe if resident is None else resident.applied(recipe)
    advice = [*_fewer_blocks(recipe, resident), *_advice(resolved)]
    fix = "; ".join(advice) + ". A run with a checkpoint resumes from it"
    return TrainingError(what, where=where, fix=fix)


def with_precision(recipe: Recipe, family: Family) -> Recipe:
    """Return the recipe with the precision that `accelerate.mixed_precision: auto` resolves to."""
    precision = family.mixed_precision(recipe.accelerate.mixed_precision)
    accelerate = recipe.accelerate.model_copy(update={"mixed_precision": precision})
    return recipe.model_copy(update={"accelerate": accelerate})


def _fewer_blocks(recipe: Recipe, resident: ResidentBlocks | None) -> list[str]:
    if recipe.training.offload != "auto" or resident is None or resident.num_blocks is None:
        return []
    kept = resident.num_blocks if resident.offload == "none" else resident.offload
    if kept == 0:
        return []
    return [f"set training.offload: {kept // 2}, because auto kept {kept} of {resident.num_blocks} blocks"]


def _advice(recipe: Recipe) -> list[str]:
    """Return the changes that save memory and that the recipe does not make yet, cheapest first."""
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
    num_processes, shard = recipe.accelerate.num_processes, recipe.accelerate.shard
    if not shard and not any(shard_violations(num_processes, training)):
        advice.append("set accelerate.shard: true, which divides the base weights among the GPUs")
    if training.offload != 0 and not shard:
        advice.append(
            "set training.offload: 0, which copies the base model's blocks from the host for each use"
        )

    # After offload, because it changes the trained weights.
    if training.weight_format == "none" and training.lora.allows_packed_weights and not shard:
        advice.append("set training.quantize: int8 or nf4")
    return [
        *advice,
        "close other programs that use the device",
        "lower buckets.resolution or training.lora.rank",
    ]
