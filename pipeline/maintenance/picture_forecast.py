"""The pictures that the evaluation after the next training would draw at most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from pipeline.encoding.speed import recorded_speed
from pipeline.evaluation.pictures import drawing_cost
from pipeline.evaluation.prompts import evaluation_prompts
from pipeline.evaluation.publishing import expected_publication
from pipeline.text_embeddings.caption_rows import text_rows
from pipeline.validated_dataset.holdout import held_out, times_drawn

if TYPE_CHECKING:
    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.recipe import Recipe
    from pipeline.trained_lora.next_action import NextAction


@dataclass(frozen=True)
class PictureForecast:
    """Pictures of an evaluation. The attributes are keys of `latentline plan --json`.

    Attributes:
        prompts: Number of prompts.
        pictures_per_prompt: Number of pictures per prompt.
        steps: Number of steps to evaluate, at each of the strengths.
        pictures: Number of all pictures, with the base model's. Pictures in the cache are not drawn again.
        seconds: Time to draw them, without process start, model loading and scoring. None if no speed was
            measured on this machine yet.
        publishes: Step that is published after the evaluation, in words; None unless `evaluation.publish` is
            best.
    """

    prompts: int
    pictures_per_prompt: int
    steps: int
    pictures: int
    seconds: float | None
    publishes: str | None = None


def forecast_pictures(
    entries: RecipeEntries, valid: pl.DataFrame, action: NextAction | None = None
) -> PictureForecast | None:
    """Return the pictures of the recipe's evaluation, or None for a recipe without one.

    `valid` is the table validated_dataset as the next job would write it. `action` is what its training does;
    None if a gate would close.
    """
    recipe = entries.recipe
    if recipe.evaluation is None:
        return None

    prompts = evaluation_prompts(recipe, entries, _inputs(entries, valid))
    steps = _num_steps(recipe, valid)
    per_step = len(prompts) * recipe.evaluation.pictures

    # The base model draws each picture once, and each step once per strength.
    passes = 1 + steps * len(recipe.evaluation.strengths)
    speed = recorded_speed(entries.machine_state_dir, "pictures")
    cost = (
        recipe.evaluation.pictures
        * passes
        * sum(drawing_cost(each.prompt.size_hw, each.prompt.steps) for each in prompts)
    )
    return PictureForecast(
        prompts=len(prompts),
        pictures_per_prompt=recipe.evaluation.pictures,
        steps=steps,
        pictures=per_step * passes,
        seconds=None if speed is None else speed * cost,
        publishes=expected_publication(recipe, action) if action and recipe.publishes_best else None,
    )


def _inputs(entries: RecipeEntries, valid: pl.DataFrame) -> pl.DataFrame:
    """Return the columns of the training inputs from which prompts are chosen."""
    fractions = {each.name: each.validation_fraction for each in entries.recipe.datasets}
    samples = valid.select("sample_id", "dataset", held_out=held_out(valid, fractions))
    first = text_rows(entries, valid).sort("variant").filter(pl.col("variant") >= 0)
    captions = first.unique("sample_id", keep="first").select("sample_id", captions=pl.concat_list("caption"))
    return samples.join(captions, on="sample_id", how="inner", maintain_order="left")


def _num_steps(recipe: Recipe, valid: pl.DataFrame) -> int:
    """Return the number of steps to evaluate; with `training.epochs`, an estimate."""
    wanted = None if recipe.evaluation is None else recipe.evaluation.steps
    if wanted == "last":
        return 1
    if isinstance(wanted, tuple):
        return len(wanted)

    training = recipe.training
    steps = training.num_steps
    if training.epochs is not None:
        batch = training.batch_size * training.gradient_accumulation * recipe.accelerate.num_processes
        steps = math.ceil(training.epochs * int(times_drawn(valid, recipe.datasets).sum()) / batch)
    # Each checkpoint has a LoRA, and the last step has one in any case.
    return max(1, math.ceil(steps / training.checkpoint_every))
