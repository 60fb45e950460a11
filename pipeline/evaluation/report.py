"""The pictures of an evaluation: a grid of base model, chosen and last step, and curves with intervals."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, cast

import polars as pl

from pipeline.cache.entry_format import PICTURE
from pipeline.evaluation.pictures import picture_spec
from pipeline.reporting.grids import CELL_PX, evenly_spaced, fitted, picture_grid
from pipeline.reporting.pictures import charts, jpeg, png
from pipeline.storage.atomic import write_bytes
from pipeline.trained_lora.previews import MAX_SHEET_BYTES, number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL.Image import Image

    from pipeline.evaluation.choice import Choice
    from pipeline.evaluation.numbers import Measured, StepNumbers
    from pipeline.evaluation.prepare import Evaluation

GRID_FILE = "grid.jpg"
CURVES_FILE = "curves.png"

NUMBERS = {
    "learned": "closer to held-out images than the base model",
    "obeys": "follows the prompt better than the base model",
    "drift": "distance from the base model's picture",
    "copies": "closer to trained images for their captions than to held-out ones for theirs",
}
"""The numbers of a step, with the label of their axis."""

_MAX_COLUMNS = 8
_CHART_PX = 420, 320


def write_pictures(
    evaluation: Evaluation, pictures: pl.DataFrame, measured: Measured, choice: Choice
) -> None:
    """Replace the pictures in the folder of the evaluation."""
    folder = evaluation.folder
    shutil.rmtree(folder, ignore_errors=True)
    write_bytes(folder / GRID_FILE, jpeg(_grid(evaluation, pictures, choice), MAX_SHEET_BYTES))
    if measured.steps:
        write_bytes(folder / CURVES_FILE, _curves(evaluation, measured.steps, choice))


def _grid(evaluation: Evaluation, pictures: pl.DataFrame, choice: Choice) -> Image:
    strength = shown_strength(evaluation)
    last = evaluation.steps[-1]
    rows = [("base model", 0, 0.0)]
    if choice.step is not None and choice.step != last:
        rows.append((f"step {choice.step:,}, chosen", choice.step, strength))
    rows.append((f"step {last:,}, last" + (", chosen" if choice.step == last else ""), last, strength))

    # Seed 0 of each prompt; of many prompts, evenly spaced ones.
    first_seeds = [index * evaluation.settings.pictures for index in range(len(evaluation.prompts))]
    numbers = [first_seeds[index] for index in evenly_spaced(len(first_seeds), _MAX_COLUMNS)]
    headings = [
        f"{prompt.role}: {prompt.prompt.caption}"
        for prompt in (evaluation.prompt_of(number)[0] for number in numbers)
    ]
    cells = [
        (label, [_picture(evaluation, pictures, step, at, number) for number in numbers])
        for label, step, at in rows
    ]
    title = f"{evaluation.recipe.name}, run {evaluation.run}, strength {number_text(strength)}"
    return picture_grid(cells, headings, title=title)


def shown_strength(evaluation: Evaluation) -> float:
    """Return the strength at which steps are compared: 1, or the highest one if 1 was not drawn."""
    strengths = evaluation.job.strengths
    return 1.0 if 1.0 in strengths else max(strengths)


def _picture(
    evaluation: Evaluation, pictures: pl.DataFrame, step: int, strength: float, number: int
) -> Image:
    from PIL import Image

    row = pictures.filter(step=step, strength=strength, number=number).row(0, named=True)
    pixels = evaluation.entries.store.read(picture_spec(row), verify=True)[PICTURE]
    return fitted(Image.fromarray(pixels), CELL_PX)


def _curves(evaluation: Evaluation, steps: tuple[StepNumbers, ...], choice: Choice) -> bytes:
    strength = shown_strength(evaluation)
    shown = [each for each in steps if each.strength == strength]
    names = [name for name in NUMBERS if any(each[name] is not None for each in shown)]
    figure, axes = charts(max(1, len(names)), _CHART_PX[0] * max(1, len(names)), _CHART_PX[1])
    limits = evaluation.settings.limits.model_dump()
    for name, own in zip(names, axes, strict=False):
        _curve(own, name, shown, cast("float | None", limits.get(name)), choice.step)
    return png(figure)


def _curve(axes: Axes, name: str, steps: list[StepNumbers], limit: float | None, chosen: int | None) -> None:
    points = [(each.step, number) for each in steps if (number := each[name]) is not None]
    xs, means = [step for step, _ in points], [number.mean for _, number in points]
    lows = [number.mean if number.low is None else number.low for _, number in points]
    highs = [number.mean if number.high is None else number.high for _, number in points]
    axes.fill_between(xs, lows, highs, color="tab:blue", alpha=0.2, linewidth=0)
    axes.plot(xs, means, "o-", color="tab:blue", markersize=3)
    if limit is not None:
        axes.axhline(limit, color="tab:red", linestyle="--", linewidth=1)
    if chosen is not None:
        axes.axvline(chosen, color="tab:green", linewidth=1)
    axes.set_title(name)
    axes.set_xlabel("step")
    axes.set_ylabel(NUMBERS[name], fontsize=7)
    axes.locator_params(axis="x", integer=True)
