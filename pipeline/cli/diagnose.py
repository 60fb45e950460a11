"""`latentline diagnose`: find captions that do not fit their images, and images that harm a trained LoRA."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo, log_to_stderr
from pipeline.cli.json_output import give
from pipeline.cli.optional_stage import local_launch, run_stage
from pipeline.cli.sample import STOPPED_STATUS
from pipeline.recipe import Recipe

if TYPE_CHECKING:
    from pipeline.reporting.reports import Report

_NUM_LEFT_OUT = 3
"""Default number of images that a training of --influence leaves out."""


@click.command(short_help="Find captions that do not fit, or images that do harm.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
@click.option("--influence", is_flag=True, help="Find images of a trained run that harm its held-out loss.")
@click.option("--run", help="Run for --influence: a folder name in runs/. By default the run of lora/.")
@click.option(
    "--without",
    "num_left_out",
    type=click.IntRange(1, 1000),
    default=_NUM_LEFT_OUT,
    show_default=True,
    metavar="N",
    help="Number of images that --influence leaves out, at most a third of all.",
)
def command(recipe: Recipe, *, influence: bool, run: str | None, num_left_out: int) -> None:
    """Find images of RECIPE that fit other captions better than their own.

    The base model's loss on each image is measured under its own caption, under this caption with a word
    exchanged, and under captions of other images, with the same noise. It needs no training, but the caches:
    after a change of images or captions, run `latentline run RECIPE --cache-only` first.

    With --influence, the gradients at the saved steps of a finished run estimate which of its images make
    the loss of held-out images higher. Then the run is trained again from its first saved step, without
    the worst N images and with the same order and noise of all others, and the held-out losses are compared.

    The losses and gradients are entries of the cache. So nothing unchanged is measured again, and a command
    that was stopped continues where it ended.
    """
    if run is not None and not influence:
        raise click.UsageError("--run needs --influence.")
    try:
        report = _influence(recipe, run, num_left_out) if influence else _diagnose(recipe)
    except KeyboardInterrupt:
        echo("\nStopped. What is measured is in the cache.", err=True)
        echo("  fix:   run the command again, which measures the rest", err=True)
        sys.exit(STOPPED_STATUS)
    if influence:
        _show_influence(recipe, report)
        give(report)
    else:
        _show(recipe, report)


def _diagnose(recipe: Recipe) -> Report:
    from pipeline.diagnosis import checks
    from pipeline.diagnosis.stage import ASSET, diagnose
    from pipeline.storage.tables import Tables

    tables = Tables(recipe.output_dir, log=log_to_stderr)
    latents, text = tables.read("vae_latents"), tables.read("text_embeddings")
    return run_stage(
        recipe,
        ASSET,
        lambda tables, launch: diagnose(recipe, latents, text, tables, launch=launch, log=log_to_stderr),
        checks.run,
    )


def _influence(recipe: Recipe, run: str | None, num_left_out: int) -> Report:
    from pipeline.diagnosis.influence import measure_influence

    launch = local_launch(recipe)
    return measure_influence(recipe, run=run, num_left_out=num_left_out, launch=launch, log=log_to_stderr)


def _show(recipe: Recipe, report: Report) -> None:
    from pipeline.diagnosis.stage import ASSET
    from pipeline.outputs.stage_files import table_file

    for each in report["worst"]:
        score = f"{each['score']:+.3f} ({each['low']:+.3f} to {each['high']:+.3f})"
        echo(f"{score}  {each['sample_id']}: {each['caption']}")
        echo(f"{'':25} fits better: {each['better_caption']}")
    echo(report["why"])
    echo(f"table: {recipe.output_dir / table_file(ASSET)}; pictures: {recipe.output_dir / 'reports' / ASSET}")


def _show_influence(recipe: Recipe, report: Report) -> None:
    from pipeline.diagnosis.influence import REPORT
    from pipeline.reporting.reports import report_path

    left_out = report.get("without", {}).get("images", [])
    for each in report["worst"]:
        mark = "*" if each["sample_id"] in left_out else " "
        echo(f"{mark} {100 * each['estimate']:+.2f}%  {each['sample_id']}: {each['caption']}")
    echo(f"(estimated change of the held-out loss without each image from step {report['from_step']} on)")
    echo(report["why"] + (", trained without the images with *" if left_out else ""))
    file = report_path(recipe.output_dir, REPORT)
    echo(f"report: {file}; all images: {file.with_suffix('.parquet')}")
