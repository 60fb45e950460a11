"""A comparison of runs, of one or several recipes: the same prompts drawn by each, and their loss curves.

<output_dir>/reports/pictures/001/      of the first recipe
comparison.jpg                          a row for each run and step, a column for each prompt
losses.png                              the running mean of each run's loss
1-flowers-2da5.../ ...                  the pictures of each run, as `latentline sample` draws them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import DrawingError, counted
from pipeline.outputs.folder import outputs_of
from pipeline.reporting.grids import CELL_PX, fitted, picture_grid
from pipeline.reporting.pictures import chart, jpeg, png
from pipeline.storage.atomic import write_bytes
from pipeline.trained_lora.differences import describe_difference, samples_of
from pipeline.trained_lora.export.lora_files import read_provenance
from pipeline.trained_lora.pictures.draw import draw
from pipeline.trained_lora.pictures.job import Cell, DrawingJob, LoraChoice
from pipeline.trained_lora.pictures.prepare import MAX_PICTURES, Request, prepare_drawing
from pipeline.trained_lora.previews import MAX_SHEET_BYTES
from pipeline.trained_lora.prompts import CaptionEntry, Prompt
from pipeline.trained_lora.report import running_mean
from pipeline.trained_lora.run_folder import RunLayout, read_metrics, run_folder

if TYPE_CHECKING:
    from PIL import Image

    from pipeline.processes.launch import Launch
    from pipeline.recipe import Recipe
    from pipeline.trained_lora.pictures.choice import Steps

SHEET_FILE = "comparison.jpg"
CURVES_FILE = "losses.png"

LABEL_PX = 300
"""Width of the labels, which contain the differences between runs."""

_MAX_LABEL_DIFFERENCES = 6


@dataclass(frozen=True)
class Compared:
    """A recipe, its run and steps to compare; None and () as in `Request`."""

    recipe: Recipe
    run: str | None = None
    steps: Steps = ()


@dataclass(frozen=True)
class ComparedLora:
    """One row of the sheet.

    Attributes:
        letter: Name of the row: A, B, ...
        job: Job that draws its pictures.
        differences: How its run differs from the first row's, in words; None for the first row.
    """

    letter: str
    job: DrawingJob
    lora: LoraChoice
    differences: Sequence[str] | None

    @property
    def name(self) -> str:
        """Letter, recipe, run and step, such as "B  flowers, run 2da5..., step 400"."""
        return f"{self.letter}  {self.job.recipe.name}, run {self.job.run}, {self.lora.label}"

    @property
    def text(self) -> str:
        """Its name, and how it differs from the first row."""
        if self.differences is None:
            return self.name
        return f"{self.name}: {'; '.join(self.differences) or 'the same run as A'}"


def prepare_comparison(
    compared: Sequence[Compared],
    *,
    prompts: tuple[str, ...] = (),
    seed: int | None = None,
    strength: float = 1.0,
) -> list[ComparedLora]:
    """Return the rows of a comparison, in the order of `compared` and of the steps of each.

    Without prompts, all rows draw the preview prompts of the first recipe, with their sizes and steps.

    Raises:
        DrawingError: As `prepare_drawing`; also if there is only one row, or too many pictures.
        TrainingError: A recipe has no run with a LoRA, or the record in a LoRA file is damaged.
    """
    jobs: list[DrawingJob] = []
    for number, each in enumerate(compared, start=1):
        request = Request(each.run, each.steps, strengths=(strength,), prompts=prompts, seed=seed)
        if jobs:
            captions = prompts or tuple(prompt.caption for prompt in jobs[0].prompts)
            job = _drawn_as(jobs[0], prepare_drawing(each.recipe, replace(request, prompts=captions)))
        else:
            job = prepare_drawing(each.recipe, request)
            job = replace(job, prompts=_distinct(job.prompts))
        folder = jobs[0].folder.parent if jobs else job.folder
        jobs.append(replace(job, folder=folder / f"{number}-{job.recipe.name}-{job.run}"))
    return _rows(jobs)


def _drawn_as(first: DrawingJob, job: DrawingJob) -> DrawingJob:
    """Return the job with the seed of `first`, and the settings of its prompts."""
    entries = RecipeEntries(job.recipe)
    multiple = entries.family.size_multiple()
    prompts: list[Prompt] = []
    for own, other in zip(job.prompts, first.prompts, strict=True):
        fits = all(edge % multiple == 0 for edge in other.size_hw)
        negative = other.negative and other.negative.caption
        prompts.append(
            replace(
                own,
                size_hw=other.size_hw if fits else own.size_hw,
                has_own_size=other.has_own_size,
                negative=CaptionEntry(negative, entries.text_spec(negative)) if negative else own.negative,
                steps=other.steps,
                guidance_scale=other.guidance_scale,
                seed=other.seed,
                lora_scale=other.lora_scale,
            )
        )
    return replace(job, prompts=tuple(prompts), seed=first.seed)


def _distinct(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    # A prompt that a recipe with sliders draws at several scales is compared at the last one, 1.
    return tuple({prompt.caption: prompt for prompt in prompts}.values())


def _rows(jobs: Sequence[DrawingJob]) -> list[ComparedLora]:
    rows: list[ComparedLora] = []
    for job, lora in ((each, lora) for each in jobs for lora in each.loras):
        letter = chr(ord("A") + len(rows)) if len(rows) < 26 else str(len(rows) + 1)
        differences = None
        if rows:
            differences = [] if job.run == rows[0].job.run else _differences(rows[0], job, lora)
        rows.append(ComparedLora(letter, job, lora, differences))

    number = len(rows) * len(jobs[0].prompts)
    if len(rows) < 2:
        what, fix = "there is nothing to compare with", "name a second recipe, run or step"
    elif number > MAX_PICTURES:
        what = f"{number:,} pictures are more than fit on one sheet, which has at most {MAX_PICTURES}"
        fix = "pass fewer runs, steps or prompts"
    else:
        return rows
    raise DrawingError(what, where=counted(len(rows), "LoRA"), fix=fix)


def _differences(first: ComparedLora, job: DrawingJob, lora: LoraChoice) -> list[str]:
    facts: list[Mapping[str, Any]] = [read_provenance(each.file)["facts"] for each in (first.lora, lora)]
    samples = [samples_of(_layout(each)) for each in (first.job, job)]
    return describe_difference(dict(facts[0]), dict(facts[1]), *samples)


def _layout(job: DrawingJob) -> RunLayout:
    return RunLayout(run_folder(job.recipe.output_dir, str(job.run)))


def draw_comparison(
    rows: Sequence[ComparedLora], launch_of: Mapping[str, Launch]
) -> tuple[Path, Path | None]:
    """Draw all pictures, the sheet and the loss curves; return the paths of sheet and curves.

    `launch_of` has a launch for each recipe, by name. There are no curves if no run has two steps.
    """
    jobs = list({row.job.folder: row.job for row in rows}.values())
    for job in jobs:
        draw(job, launch_of[job.recipe.name])
    folder = jobs[0].folder.parent
    write_bytes(folder / SHEET_FILE, _sheet(rows))
    curves = loss_curves({row.name: _layout(row.job) for row in _by_run(rows)})
    if curves:
        write_bytes(folder / CURVES_FILE, curves)
    return folder / SHEET_FILE, folder / CURVES_FILE if curves else None


def _by_run(rows: Sequence[ComparedLora]) -> list[ComparedLora]:
    return list({row.job.run: row for row in reversed(rows)}.values())[::-1]


def _sheet(rows: Sequence[ComparedLora]) -> bytes:
    first = rows[0].job
    pictures = [
        (_label(row), [_picture(cell) for cell in row.job.cells() if cell.lora == row.lora]) for row in rows
    ]
    headings = [prompt.heading for prompt in first.prompts]
    grid = picture_grid(pictures, headings, title=f"seed {first.seed}", label_px=LABEL_PX)
    return jpeg(grid, MAX_SHEET_BYTES)


def _label(row: ComparedLora) -> str:
    differences = None if row.differences is None else row.differences[:_MAX_LABEL_DIFFERENCES]
    return replace(row, differences=differences).text


def _picture(cell: Cell) -> Image.Image:
    from PIL import Image

    with Image.open(cell.path) as picture:
        return fitted(picture, CELL_PX)


def loss_curves(runs: Mapping[str, RunLayout]) -> bytes:
    """Return a PNG with the running mean of the loss per step of each run; no bytes if no run has a curve."""
    figure, axes = chart(720, 420)
    num_curves = 0
    for name, layout in runs.items():
        metrics = read_metrics(layout.metrics, 10**9)
        if len(metrics) > 1:
            losses = [line["loss"] for line in metrics]
            axes.plot([line["step"] + 1 for line in metrics], running_mean(losses), label=name)
            num_curves += 1
    if not num_curves:
        return b""
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("steps")
    axes.set_ylabel("running mean of the loss")
    axes.legend(fontsize="small")
    return png(figure)


def fetch_metrics(rows: Sequence[ComparedLora]) -> None:
    """Fetch the metrics of the runs whose output folder is at an address."""
    for row in _by_run(rows):
        outputs_of(row.job.recipe).fetch(f"runs/{row.job.run}/logs/")
