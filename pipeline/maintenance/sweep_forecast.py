"""The steps, time and disk space of the sweep after the next training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.sweep.halving import rungs, total_steps
from pipeline.sweep.variants import variants
from pipeline.trained_lora.run_folder import RunLayout, checkpoint_list

if TYPE_CHECKING:
    from pipeline.maintenance.training_forecast import TrainingForecast
    from pipeline.recipe import Recipe


@dataclass(frozen=True)
class SweepForecast:
    """Training of a sweep. The attributes are keys of `latentline plan --json`.

    Attributes:
        runs: Number of runs: of variants, each with its seeds.
        steps: Number of steps if no variant fails, at most the budget. Steps that earlier sweeps have trained
            are included, because only their planning could tell them apart.
        steps_of_all: Number of steps of all runs to their ends.
        seconds: Time of these steps, without judging them. None if no training was measured on this machine.
        disk_bytes: Size of the checkpoints; None until a run of the recipe has saved one.
    """

    variants: int
    runs: int
    steps: int
    steps_of_all: int
    seconds: float | None
    disk_bytes: int | None


def forecast_sweep(recipe: Recipe, training: TrainingForecast | None) -> SweepForecast | None:
    """Return the training of the recipe's sweep; None for a recipe without one.

    `training` is the recipe's own training, which measures a step and converts its epochs.

    Raises:
        RecipeError: A variant is not a valid recipe.
    """
    if recipe.sweep is None:
        return None
    settings, chosen = recipe.sweep, variants(recipe)
    own_steps = None if training is None else training.action.steps
    lengths = [
        own_steps or each.training.num_steps if each.training.epochs is not None else each.training.num_steps
        for variant in chosen
        for each in variant.recipes[:1]
    ]
    steps = settings.seeds * total_steps(settings.halving, lengths)
    if settings.budget is not None and settings.budget.steps is not None:
        steps = min(steps, settings.budget.steps)

    seconds = None
    if training is not None and training.duration is not None and training.action.steps_left:
        seconds = training.duration.seconds / training.action.steps_left * steps
    num_kept = recipe.training.keep_checkpoints or len(rungs(settings.halving))
    largest = max(_checkpoint_bytes(recipe), default=None)
    num_saved = settings.seeds * len(chosen) * min(num_kept, len(rungs(settings.halving)))
    return SweepForecast(
        variants=len(chosen),
        runs=settings.seeds * len(chosen),
        steps=steps,
        steps_of_all=settings.seeds * sum(lengths),
        seconds=seconds,
        disk_bytes=None if largest is None else largest * num_saved,
    )


def _checkpoint_bytes(recipe: Recipe) -> list[int]:
    folders = sorted((recipe.output_dir / "runs").glob("*/"))
    return [each["bytes"] for folder in folders for each in checkpoint_list(RunLayout(folder))]
