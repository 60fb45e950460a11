"""The scores of variants: pictures of the concept, or losses on held-out images, each with its cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import SweepError
from pipeline.evaluation.choice import broken_limits, qualities
from pipeline.evaluation.intervals import CELL, PROMPT
from pipeline.evaluation.numbers import measured
from pipeline.trained_lora.run_folder import RunLayout, read_metrics

if TYPE_CHECKING:
    from pipeline.evaluation.prompts import RolePrompt
    from pipeline.trained_lora.job import TrainingJob

BY_IMAGE = "by_image"
"""Key of a validation loss with the loss of each held-out image."""

_OTHER_LOSS = ("training.loss.", "training.noise.", "training.timesteps.")


def shares_loss(keys: Sequence[str]) -> bool:
    """Return whether variants of these keys measure the same loss on the same images and captions."""
    return all(key.startswith("training.") and not key.startswith(_OTHER_LOSS) for key in keys)


def validation_cells(job: TrainingJob, step: int, *, seed: int) -> pl.DataFrame:
    """Return how much lower the loss on each held-out image is after `step` steps than before training.

    The columns are `CELL` and `score`. All runs measure an image with the same noise at the same levels.

    Raises:
        SweepError: The run has no losses by image.
    """
    layout = RunLayout(job.folder)
    lines = {line["step"]: line for line in read_metrics(layout.validation, step + 1)}
    before, after = (lines.get(each, {}).get(BY_IMAGE) for each in (0, step))
    held_out = job.inputs.held_out
    if before is None or after is None or len(before) != len(held_out) or len(after) != len(held_out):
        raise SweepError(
            f"run {job.run} has no validation loss of each held-out image at step {step}",
            where=str(layout.validation),
            fix=f"delete {layout.folder}, and start the sweep again, which trains the run again",
        )
    names = held_out.identities.cast(pl.String)
    return pl.DataFrame(
        {"prompt": names, "score": pl.Series(before, dtype=pl.Float64) - pl.Series(after, dtype=pl.Float64)}
    ).select(role=pl.lit(""), concept=pl.lit(""), prompt="prompt", seed=pl.lit(seed, pl.Int64), score="score")


def expected_cells(cells: pl.DataFrame, earlier: pl.DataFrame, *, ahead: float) -> pl.DataFrame:
    """Return the scores that cells have later if they go on rising as they did since an earlier step.

    Args:
        cells: Scores now, with the columns `CELL` and `score`.
        earlier: Scores of the same cells at the earlier step.
        ahead: Number of steps until later, divided by the number of steps since the earlier one.
    """
    pairs = cells.join(earlier, on=CELL, suffix="_earlier", maintain_order="left")
    risen = pl.col("score") - pl.col("score_earlier")
    return pairs.with_columns(score=pl.col("score") + ahead * risen).drop("score_earlier")


def numbered_prompts(scores: pl.DataFrame, prompts: Sequence[RolePrompt]) -> pl.DataFrame:
    """Return scores with the number of each prompt among those with its role, instead of text and concept.

    Variants with other captions or trigger words have other prompts, which are compared in their order.
    """
    numbers, rows = dict[str, int](), dict[tuple[str, str, str], str]()
    for each in prompts:
        number = numbers[each.role] = numbers.get(each.role, 0) + 1
        rows.setdefault((each.role, each.concept, each.prompt.caption), str(number))
    table = pl.DataFrame(
        [(*key, number) for key, number in rows.items()],
        schema=[*PROMPT, "number_of_prompt"],
        orient="row",
    )
    numbered = scores.join(table, on=PROMPT, how="inner", maintain_order="left")
    return numbered.with_columns(concept=pl.lit(""), prompt="number_of_prompt").drop("number_of_prompt")


def picture_cells(
    scores: Mapping[int, Sequence[pl.DataFrame]], limits: Mapping[str, float], *, pictures: int
) -> tuple[dict[int, pl.DataFrame], dict[int, str]]:
    """Return the quality of each picture of the concept by variant, and the limits that variants exceed.

    Args:
        scores: Scores of each run of each variant, with the columns `SCORES`, at one step and strength.
        limits: Maximum mean by number.
        pictures: Number of pictures per prompt, which distinguishes the seeds of two runs.

    Raises:
        SweepError: The pictures have no scores that compare them with held-out images.
    """
    numbered = [
        rows.with_columns(
            step=pl.lit(variant, pl.Int64), seed=pl.col("seed") + number * pictures, strength=pl.lit(1.0)
        )
        for variant, of_runs in scores.items()
        for number, rows in enumerate(of_runs)
    ]
    result = measured(pl.concat(numbered))
    if reason := result.absent.get("learned"):
        raise SweepError(
            f"the variants cannot be compared: {reason}",
            where="the evaluation of the sweep",
            fix="correct the section evaluation, or set sweep.judge: validation_loss",
        )
    broken: dict[int, str] = {
        each.step: what for each in result.steps if (what := broken_limits(each, limits))
    }
    return dict[int, Any](qualities(result.scores)), broken
