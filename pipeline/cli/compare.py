"""`latentline compare`: one sheet of the same prompts, drawn by several runs, recipes or steps."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo, log_to_stderr
from pipeline.cli.json_output import give
from pipeline.cli.sample import STOPPED_STATUS, parse_prompts
from pipeline.cli.step_options import parse_steps
from pipeline.errors import counted
from pipeline.trained_lora.pictures.comparison import (
    Compared,
    draw_comparison,
    fetch_metrics,
    prepare_comparison,
)


class ComparedArgument(click.ParamType[Compared]):
    """A recipe with an optional run and optional steps: `flowers`, `flowers/2da5...` or `flowers@250,500`."""

    name = "lora"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Compared:
        """Load the recipe."""
        if isinstance(value, Compared):
            return value
        target, _, steps = str(value).partition("@")
        # A path has slashes too, but ends in .yaml.
        name, run = target, None
        if "/" in target and not target.endswith((".yaml", ".yml")):
            name, _, run = target.rpartition("/")
        recipe = RECIPE_WITH_OUTPUTS.convert(name, param, ctx)
        return Compared(recipe, run, parse_steps([steps]) if steps else ())


@click.command(short_help="Draw the same prompts with several runs, on one sheet.")
@click.argument("loras", metavar="LORA...", type=ComparedArgument(), nargs=-1, required=True)
@click.option("--prompt", "prompts", multiple=True, help="Prompt to draw. Repeat it for several.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    help="Seed of all pictures. By default the seed of each prompt, or else the seed of the first recipe.",
)
@click.option(
    "--strength", "--scale", type=float, default=1.0, show_default=True, help="Strength of all LoRAs."
)
def command(loras: tuple[Compared, ...], prompts: tuple[str, ...], **options: Any) -> None:
    """Draw the same prompts with several LoRAs, and put them on one sheet with what differs between them.

    LORA is the name of a recipe, whose published LoRA is drawn. Add a run or steps to compare others:

    \b
    latentline compare flowers roses              two recipes
    latentline compare flowers@250,500,750        three steps of a run, or all of them: flowers@all
    latentline compare flowers flowers/2da5c7...  two runs, by the names of their folders in runs/

    Each row of the sheet states how its run differs from the first one. A second picture has the loss curves.
    Both are in reports/pictures/ of the first recipe's outputs.
    """  # noqa: D301 - click needs the character that \b stands for
    rows = prepare_comparison(loras, prompts=parse_prompts(prompts), **options)
    for row in rows:
        echo(row.text)
    fetch_metrics(rows)
    try:
        sheet, curves = draw_comparison(rows, {each.recipe.name: _launch(each) for each in loras})
    except KeyboardInterrupt:
        echo("\nStopped: the comparison is incomplete", err=True)
        echo(f"  where: {rows[0].job.folder.parent}", err=True)
        echo("  fix:   run the command again, with fewer pictures if it takes too long", err=True)
        sys.exit(STOPPED_STATUS)
    _upload(loras[0], sheet.parent)
    echo(f"{counted(len(rows), 'LoRA')}, {counted(len(rows[0].job.prompts), 'prompt')}")
    echo(f"sheet:  {sheet}")
    if curves is not None:
        echo(f"losses: {curves}")
    give(
        {
            "loras": [{"name": row.name, "differences": row.differences} for row in rows],
            "prompts": len(rows[0].job.prompts),
            "sheet": sheet,
            "losses": curves,
        }
    )


def _launch(compared: Compared) -> Any:
    from pipeline.processes.launch import LocalLaunch
    from pipeline.reporting.terminal import TERMINAL_VARIABLE

    # On a terminal, the launched process draws a bar, and its lines would disturb it.
    log = None if TERMINAL_VARIABLE in os.environ else log_to_stderr
    accelerate = compared.recipe.accelerate.model_copy(update={"num_processes": 1, "shard": False})
    return LocalLaunch(accelerate, log)


def _upload(compared: Compared, folder: Any) -> None:
    from pipeline.outputs.folder import outputs_of

    name = folder.relative_to(compared.recipe.output_dir).as_posix()
    outputs_of(compared.recipe, log_to_stderr).upload(f"{name}/")
