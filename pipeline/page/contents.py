"""What the sections of the page show, read from tables, reports and runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.page.runs import Run, difference, loss_charts, more_charts, preview_grid
from pipeline.page.stages import Stage, read_stages
from pipeline.reporting.reports import read_report
from pipeline.trained_lora.export.lora_files import CARD_FILE, LORA_FOLDER, PROVENANCE_FILE
from pipeline.trained_lora.pictures.prepare import PICTURES_FOLDER
from pipeline.trained_lora.previews import PROMPT_KEY
from pipeline.trained_lora.run_folder import read_record

if TYPE_CHECKING:
    from pipeline.page.dataset import Dataset
    from pipeline.recipe import Recipe

RESULT_PICTURES = {
    "evaluation": {
        "curves.png": "Numbers of the evaluated steps, with intervals",
        "grid.jpg": "Pictures of the base model, the chosen step and the last step",
    },
    "sweep": {
        "scores.png": "Scores of the variants by step",
        "parallel.png": "Settings and score of each variant, one line per variant",
        "sheet.jpg": "Pictures of the variants",
    },
    "diagnosis": {
        "worst.jpg": "Images whose caption does not fit, next to images whose caption fits better",
    },
    "influence": {},
}
"""Pictures in the folders of the optional results, with the text that describes them."""

NUMBERS = ("learned", "obeys", "drift", "copies")
"""Numbers of an evaluation, in the order of their columns."""

MAX_CARD_CHARACTERS = 20_000


MAX_DRAWINGS = 24

_DRAWN = re.compile(r"step-(\d+)-strength-(.+)-prompt-\d+\.png")


@dataclass(frozen=True)
class Drawing:
    """A picture that `latentline sample` has drawn.

    Attributes:
        name: Name of its folder in `reports/pictures`.
        text: Its step and strength.
    """

    path: Path
    name: str
    prompt: str
    text: str


def drawings(recipe: Recipe) -> list[Drawing]:
    """Return the pictures that `latentline sample` has drawn last, the newest first."""
    folders = [path for path in (recipe.output_dir / PICTURES_FOLDER).glob("[0-9]*") if path.name.isdecimal()]
    folders.sort(key=lambda path: int(path.name), reverse=True)
    paths = (path for folder in folders for path in sorted(folder.glob("*.png")))
    return [each for path in islice(paths, MAX_DRAWINGS) if (each := _drawing(path, path.stat().st_mtime_ns))]


@lru_cache(maxsize=256)
def _drawing(path: Path, mtime_ns: int) -> Drawing | None:
    from PIL import Image

    del mtime_ns  # a picture that was drawn again is another argument
    name = _DRAWN.fullmatch(path.name)
    text = f"step {int(name[1]):,}, strength {name[2]}" if name else path.stem
    try:
        with Image.open(path, formats=("PNG",)) as picture:
            return Drawing(path, path.parent.name, str(picture.info.get(PROMPT_KEY, "")), text)
    except (OSError, ValueError, SyntaxError):
        return None


@dataclass(frozen=True)
class Limits:
    """Maximum numbers of what one page shows; it states the totals."""

    runs: int = 12
    preview_steps: int = 12
    preview_prompts: int = 8


def training_contents(recipe: Recipe, runs: Sequence[Run], limits: Limits) -> dict[str, Any]:
    """Return the values of the sections stages, training and previews."""
    newest = runs[0] if runs else None
    grid = preview_grid(
        newest.previews if newest else [],
        max_steps=limits.preview_steps,
        max_prompts=limits.preview_prompts,
    )
    return {
        "stages": [_with_progress(stage, newest) for stage in read_stages(recipe.output_dir)],
        "run": newest,
        "loss_charts": loss_charts(runs),
        "more_charts": more_charts(newest) if newest else [],
        "grid": grid,
    }


def _with_progress(stage: Stage, run: Run | None) -> Stage:
    """Return the stage with the steps of an unfinished training, which its last report does not contain."""
    if stage.name != "trained_lora" or run is None or run.state == "finished":
        return stage
    # A run that was stopped may have a report, with the gate that stopped it.
    if run.state == "stopped" and stage.kind != "none":
        return stage
    return Stage(stage.name, run.state, "none", f"step {run.step:,} of {run.num_steps:,}")


def run_rows(runs: Sequence[Run], start: int, number: int) -> list[dict[str, Any]]:
    """Return so many runs from `start` on, each with what differs from the run before it."""
    return [
        {"run": run, "differs": difference(run, runs[index + 1] if index + 1 < len(runs) else None)}
        for index, run in list(enumerate(runs))[start : start + number]
    ]


def result_contents(recipe: Recipe, dataset: Dataset) -> dict[str, Any]:
    """Return the values of the sections of `RESULT_PICTURES` and of the LoRA's card."""
    found = {name: read_report(recipe.output_dir, name) for name in RESULT_PICTURES}
    results = {name: report for name, report in found.items() if report is not None}
    named = {row["sample_id"] for report in results.values() for row in report.get("worst", ())}
    rows = dataset.shown(dataset.kept.filter(pl.col("sample_id").is_in(named)))
    folder = recipe.output_dir / LORA_FOLDER
    record = read_record(folder / PROVENANCE_FILE)
    run = record.get("run")
    return {
        "results": results,
        "result_pictures": {name: _pictures(recipe, name) for name in RESULT_PICTURES},
        "thumbnails": {row["sample_id"]: row["thumbnail"] for row in rows},
        "numbers": NUMBERS,
        "card": _text(folder / CARD_FILE),
        "published": {"run": run, "step": record.get("step", record.get("steps"))} if run else {},
        "lora_files": sorted(folder.glob("*.safetensors")),
    }


def _pictures(recipe: Recipe, asset: str) -> list[tuple[Path, str]]:
    folder = recipe.output_dir / "reports" / asset
    paths = ((folder / name, text) for name, text in RESULT_PICTURES[asset].items())
    return [(path, text) for path, text in paths if path.is_file()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:MAX_CARD_CHARACTERS]
    except OSError:
        return ""
