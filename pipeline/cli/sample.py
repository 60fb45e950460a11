"""`latentline sample`: draw pictures with a trained LoRA."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo, log_to_stderr
from pipeline.cli.json_output import give
from pipeline.cli.step_options import comma_separated, step_options
from pipeline.errors import DrawingError, counted
from pipeline.recipe import Recipe

if TYPE_CHECKING:
    from pipeline.trained_lora.pictures.job import DrawingJob

STOPPED_STATUS = 130
"""Exit status that shells give to a command which Ctrl-C ended."""

_PATH = click.Path(path_type=Path)


@click.command(short_help="Draw pictures with a trained LoRA.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
@click.argument("prompts", nargs=-1)
@click.option(
    "--prompt",
    "more_prompts",
    multiple=True,
    help="Another way to pass a PROMPT. Repeat it for several.",
)
@click.option(
    "--reference",
    "references",
    type=_PATH,
    multiple=True,
    help="Reference image, for base models that edit images. Repeat it for several, in order. By default, "
    "each prompt of training.sample_prompts has its own.",
)
@step_options(
    run="Run to draw with",
    steps="Steps to compare. By default only the LoRA in lora/, or the last step of --run.",
)
@click.option("--lora", "file", type=_PATH, help="LoRA file to draw with, instead of the LoRA of a run.")
@click.option(
    "--strength",
    "--scale",
    "strengths",
    multiple=True,
    metavar="X[,X...]",
    callback=lambda _ctx, _option, values: parse_strengths(values),
    help="Strengths of the LoRA to compare. By default 1. At 0, the base model draws alone.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    help="Seed of all pictures. By default the seed of each prompt, or else training.seed.",
)
@click.option(
    "--output", type=_PATH, help="Folder for the pictures. By default a new one in reports/pictures/."
)
def command(recipe: Recipe, prompts: tuple[str, ...], more_prompts: tuple[str, ...], **options: Any) -> None:
    """Draw pictures with the LoRA of RECIPE, and put them on one sheet.

    Each PROMPT is drawn at each step and strength. Without a PROMPT, the command draws
    training.sample_prompts, or else the prompts of the run's previews.

    Settings and seed are the same as in previews, so the pictures can be compared with them. You can
    draw with the checkpoints of a run that is still training: they are only read. No existing file is
    replaced.
    """
    from pipeline.trained_lora.pictures.prepare import Request, prepare_drawing

    request = Request(prompts=parse_prompts([*prompts, *more_prompts]), **options)
    if request.file is not None and (request.run or request.steps):
        raise click.UsageError("--lora excludes --run and --step.")
    job = prepare_drawing(recipe, request)

    echo(_summary(job), err=True)
    try:
        sheet = _draw(job)
    except KeyboardInterrupt:
        # The pictures that are complete stay, so they are uploaded too.
        _upload(recipe, job)
        _report_stop(job)
        sys.exit(STOPPED_STATUS)
    _upload(recipe, job)
    echo(f"{counted(len(list(job.cells())), 'picture')} in {job.folder}")
    echo(f"sheet: {sheet}")
    give({"pictures": len(list(job.cells())), "folder": job.folder, "sheet": sheet})


def parse_strengths(values: Iterable[str]) -> tuple[float, ...]:
    """Return the strengths of repeated or comma-separated options, without repetitions; 1 without any."""
    strengths: list[float] = []
    for text in comma_separated(values) or ["1"]:
        try:
            strength = float(text)
        except ValueError:
            strength = math.nan
        if not math.isfinite(strength):
            raise DrawingError(
                f"a strength must be a finite number, got {text!r}",
                where="--strength",
                fix="pass numbers such as --strength 0,0.5,1",
            )
        strengths.append(strength + 0.0)  # -0.0 becomes 0.0
    return tuple(dict.fromkeys(strengths))


def parse_prompts(values: Iterable[str]) -> tuple[str, ...]:
    """Return the prompts without repetitions."""
    prompts = tuple(dict.fromkeys(values))
    if not all(prompt.strip() for prompt in prompts):
        raise DrawingError(
            "a prompt is empty", where="--prompt", fix='pass text such as --prompt "a red rose"'
        )
    return prompts


def _draw(job: DrawingJob) -> Path:
    from pipeline.processes.launch import LocalLaunch
    from pipeline.reporting.terminal import TERMINAL_VARIABLE
    from pipeline.trained_lora.pictures.draw import draw

    # On a terminal, the launched process draws a bar, and its lines would disturb it.
    log = None if TERMINAL_VARIABLE in os.environ else log_to_stderr
    return draw(job, LocalLaunch(job.recipe.accelerate, log))


def _upload(recipe: Recipe, job: DrawingJob) -> None:
    from pipeline.outputs.folder import outputs_of

    # With --output, the pictures are in a folder of the user's choice and stay there.
    if job.folder.is_relative_to(recipe.output_dir):
        outputs_of(recipe, log_to_stderr).upload(f"{job.folder.relative_to(recipe.output_dir).as_posix()}/")


def _summary(job: DrawingJob) -> str:
    from pipeline.trained_lora.previews import number_text

    source = job.loras[0].label if job.run is None else f"run {job.run}"
    if job.run is not None:
        steps = ", ".join(str(lora.step) for lora in job.loras)
        source += f", {'step' if len(job.loras) == 1 else 'steps'} {steps}"
    strengths = ", ".join(map(number_text, job.strengths))
    number = counted(len(list(job.cells())), "picture")
    return f"{source}, strength {strengths}, {counted(len(job.prompts), 'prompt')}, seed {job.seed}: {number}"


def _report_stop(job: DrawingJob) -> None:
    from pipeline.trained_lora.pictures.draw import num_drawn

    drawn, total = num_drawn(job), len(list(job.cells()))
    echo(f"\nStopped: {drawn} of {counted(total, 'picture')} drawn", err=True)
    echo(f"  where: {job.folder}" if drawn else "  where: no file was written", err=True)
    echo("  fix:   run the command again, with fewer pictures if it takes too long", err=True)
