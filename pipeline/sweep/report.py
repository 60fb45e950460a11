"""The pictures of a sweep: a sheet of all variants, their scores by step, and parallel coordinates."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.entry_format import PICTURE
from pipeline.evaluation.pictures import picture_spec
from pipeline.evaluation.report import shown_strength
from pipeline.recipe.sweep import is_logarithmic
from pipeline.reporting.grids import evenly_spaced, picture_grid
from pipeline.reporting.pictures import chart, jpeg, png
from pipeline.storage.atomic import write_bytes
from pipeline.sweep.variants import overrides_text
from pipeline.trained_lora.previews import MAX_SHEET_BYTES, preview_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL.Image import Image

    from pipeline.evaluation.prepare import Evaluation
    from pipeline.recipe import Recipe
    from pipeline.sweep.judging import Decision
    from pipeline.sweep.runs import VariantRun
    from pipeline.sweep.variants import Variant

SHEET_FILE = "sheet.jpg"
SCORES_FILE = "scores.png"
PARALLEL_FILE = "parallel.png"

_MAX_COLUMNS = 6
_CELL_PX = 128
_LABEL_PX = 220
_CHART_PX = 560, 360
_AXIS_PX = 150


@dataclass(frozen=True)
class Shown:
    """What the sheet shows of a variant: its first run at the step that was judged last.

    `evaluation` and `pictures` are None if the sweep is judged by the validation loss; the run's previews are
    shown then.
    """

    run: VariantRun
    step: int
    evaluation: Evaluation | None = None
    pictures: pl.DataFrame | None = None


def write_pictures(
    recipe: Recipe,
    variants: Sequence[Variant],
    table: pl.DataFrame,
    shown: Mapping[int, Shown],
    decision: Decision,
) -> None:
    """Replace the pictures in `reports/sweep`."""
    folder = recipe.output_dir / "reports" / "sweep"
    shutil.rmtree(folder, ignore_errors=True)
    if (sheet := _sheet(recipe, variants, shown, decision)) is not None:
        write_bytes(folder / SHEET_FILE, jpeg(sheet, MAX_SHEET_BYTES))
    judged = table.drop_nulls("score").unique(["variant", "step"], keep="first").sort("variant", "step")
    if not judged.is_empty():
        write_bytes(folder / SCORES_FILE, _scores(judged, decision.winner))
        write_bytes(folder / PARALLEL_FILE, _parallel(variants, judged, decision.winner))


def _sheet(
    recipe: Recipe, variants: Sequence[Variant], shown: Mapping[int, Shown], decision: Decision
) -> Image | None:
    rows: list[tuple[str, list[Image | None]]] = []
    headings: list[str] = []
    for variant in variants:
        each = shown.get(variant.number)
        if each is None:
            continue
        names, pictures = _pictures(each)
        headings = max(headings, names, key=len)
        won = ", the winner" if variant.number == decision.winner else ""
        rows.append(
            (f"{variant.number}: {overrides_text(variant.overrides)}; step {each.step:,}{won}", pictures)
        )
    if not headings:
        return None
    # A variant with other prompts may have fewer pictures.
    filled = [(label, [*pictures, *[None] * (len(headings) - len(pictures))]) for label, pictures in rows]
    title = f"{recipe.name}: {decision.why}"
    return picture_grid(filled, headings, title=title, cell_px=_CELL_PX, label_px=_LABEL_PX)


def _pictures(shown: Shown) -> tuple[list[str], list[Image | None]]:
    """Return the prompts and pictures of a variant: of concept prompts with seed 0, or the run's previews."""
    from PIL import Image

    if shown.evaluation is None or shown.pictures is None:
        job = shown.run.job
        files = [preview_file(shown.run.layout.previews, shown.step, n) for n in range(len(job.prompts))]
        names = [prompt.heading for prompt in job.prompts][:_MAX_COLUMNS]
        if not any(file.is_file() for file in files):
            return [], []
        return names, [
            Image.open(file).convert("RGB") if file.is_file() else None for file in files[:_MAX_COLUMNS]
        ]

    rows = shown.pictures.filter(
        role="concept", seed=0, step=shown.step, strength=shown_strength(shown.evaluation)
    ).to_dicts()
    chosen = [rows[index] for index in evenly_spaced(len(rows), _MAX_COLUMNS)]
    store = shown.evaluation.entries.store
    pictures = [Image.fromarray(store.read(picture_spec(row), verify=True)[PICTURE]) for row in chosen]
    return [row["prompt"] for row in chosen], list(pictures)


def _scores(judged: pl.DataFrame, winner: int | None) -> bytes:
    """Return the chart of all scores by step."""
    figure, axes = chart(*_CHART_PX)
    for (variant,), rows in judged.group_by("variant", maintain_order=True):
        is_winner = variant == winner
        style: dict[str, Any] = {"color": "tab:green", "linewidth": 2} if is_winner else {"linewidth": 1}
        axes.plot(rows["step"], rows["score"], "o-", markersize=3, label=str(variant), **style)
    axes.set_xlabel("step")
    axes.set_ylabel("score, higher is better")
    axes.locator_params(axis="x", integer=True)
    axes.legend(title="variant", fontsize=6, ncols=3)
    return png(figure)


def _parallel(variants: Sequence[Variant], judged: pl.DataFrame, winner: int | None) -> bytes:
    """Return one line per variant across an axis for each key that varies and one for its last score."""
    last = judged.unique("variant", keep="last", maintain_order=True)
    scores = dict(last.select("variant", "score").iter_rows())
    chosen = [variant for variant in variants if variant.number in scores]
    keys = list(dict.fromkeys(key for variant in chosen for key in variant.overrides))
    places = {key: _places(key, [variant.overrides.get(key) for variant in chosen]) for key in keys}
    low, high = min(scores.values()), max(scores.values())

    figure, axes = chart(max(_CHART_PX[0], _AXIS_PX * (len(keys) + 1)), _CHART_PX[1])
    for variant in chosen:
        score = (scores[variant.number] - low) / (high - low) if high > low else 0.5
        ys = [places[key][_text(variant.overrides.get(key))] for key in keys]
        is_winner = variant.number == winner
        color = "tab:green" if is_winner else _shade(score)
        axes.plot(range(len(keys) + 1), [*ys, score], color=color, linewidth=2.5 if is_winner else 1.2)
    for index, key in enumerate(keys):
        for text, y in places[key].items():
            axes.annotate(text, (index, y), fontsize=7, xytext=(3, 2), textcoords="offset points")
    _label_axes(axes, [key.removeprefix("training.") for key in keys], low, high)
    return png(figure)


def _label_axes(axes: Axes, keys: Sequence[str], low: float, high: float) -> None:
    for index in range(len(keys) + 1):
        axes.axvline(index, color="lightgrey", linewidth=1, zorder=0)
    axes.set_xticks(range(len(keys) + 1), [*keys, f"score ({low:.3g} to {high:.3g})"], fontsize=7)
    axes.set_yticks([])
    axes.set_ylim(-0.08, 1.12)


def _places(key: str, values: Sequence[Any]) -> dict[str, float]:
    """Return the place of each value on its axis, from 0 to 1: numbers by size, others in their order."""
    distinct = {_text(value): value for value in values}
    numbers = [each for each in distinct.values() if isinstance(each, int | float)]
    if len(numbers) < len(distinct) or (is_logarithmic(key) and min(numbers) <= 0):
        return {text: index / max(1, len(distinct) - 1) for index, text in enumerate(distinct)}

    scaled = {text: math.log(value) if is_logarithmic(key) else value for text, value in distinct.items()}
    low, high = min(scaled.values()), max(scaled.values())
    return {text: (value - low) / (high - low) if high > low else 0.5 for text, value in scaled.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _shade(score: float) -> tuple[float, float, float]:
    """Return a grey that is darker for a better score."""
    grey = 0.85 - 0.6 * score
    return grey, grey, grey
