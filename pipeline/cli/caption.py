"""`latentline caption`: caption images with the model of the recipe, show some captions, or export them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo, log_to_stderr
from pipeline.cli.json_output import give
from pipeline.cli.optional_stage import run_stage
from pipeline.cli.sample import STOPPED_STATUS
from pipeline.errors import RecipeError
from pipeline.recipe import Recipe
from pipeline.recipe.isolation import require_isolation

if TYPE_CHECKING:
    import polars as pl

    from pipeline.processes.launch import Launch
    from pipeline.reporting.reports import Report


@click.command(short_help="Caption images with a vision-language model.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
@click.option("--sample", type=click.IntRange(min=1), help="Caption this many images, and show them.")
@click.option(
    "--export",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the captions of the last job as text files below this folder, for other tools.",
)
def command(recipe: Recipe, sample: int | None, folder: Path | None) -> None:
    """Caption the images of RECIPE that have no caption, with the model of `captions: {from: model}`.

    The job of the recipe does the same. Captions are entries of the cache: an unchanged image is not
    captioned again, and a command that was stopped continues where it ended. The dataset is never changed.

    With --sample 8, eight images are captioned, the same ones each time, to try a prompt before the whole
    dataset. reports/caption_samples/sheet.jpg shows them with their captions.
    """
    from pipeline.captions.report import SAMPLES, sheet_path
    from pipeline.captions.stage import ASSET

    require_isolation(recipe)
    if not recipe.has_model_captions:
        raise RecipeError(
            "no dataset of the recipe has captions from a model",
            where=str(recipe.source),
            fix="set datasets[].captions: {from: model, model: a Hub id or a folder}",
        )
    if folder is not None:
        if sample is not None:
            raise click.UsageError("--export excludes --sample.")
        _export(recipe, folder.absolute())
        return
    try:
        table, report = _caption(recipe, sample)
    except KeyboardInterrupt:
        echo("\nStopped. Captions that are written are in the cache.", err=True)
        echo("  fix:   run the command again, which writes the others", err=True)
        sys.exit(STOPPED_STATUS)
    if sample is not None:
        for name, text in table.select("sample_id", "caption").iter_rows():
            echo(sample_line(name, text))
    echo(report["why"])
    echo(f"pictures: {sheet_path(recipe, ASSET if sample is None else SAMPLES)}")


def sample_line(sample_id: str, caption: str) -> str:
    """Return the line of a sample on the terminal."""
    # A second line of a caption could pass for another image, or for an error.
    return f"{sample_id}: {' '.join(caption.split())}"


def _caption(recipe: Recipe, sample: int | None) -> tuple[pl.DataFrame, Report]:
    """Caption as the asset does; the results of a sample are not the recipe's, but its entries are reused."""
    from pipeline.captions import checks
    from pipeline.captions.report import SAMPLES
    from pipeline.captions.stage import ASSET, caption_images
    from pipeline.raw_images.stage import scan
    from pipeline.reporting.reports import StageResult
    from pipeline.storage.tables import Tables

    # The files as they are now: the first captions are tried before any job.
    raw = scan(recipe, Tables(recipe.output_dir), log=log_to_stderr, remember=False).table
    results: list[StageResult] = []

    def stage(tables: Tables, launch: Launch) -> StageResult:
        results.append(caption_images(recipe, raw, tables, launch=launch, log=log_to_stderr, sample=sample))
        return results[-1]

    report = run_stage(recipe, ASSET, stage, checks.run, aside=None if sample is None else SAMPLES)
    return results[-1].table, report


def _export(recipe: Recipe, folder: Path) -> None:
    from pipeline.captions.export import export_captions

    number = export_captions(recipe, folder)
    echo(f"{number:,} captions written below {folder}")
    give({"folder": folder, "captions": number})
