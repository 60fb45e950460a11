"""`latentline export`: publish the LoRA of an earlier step."""

from __future__ import annotations

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo
from pipeline.errors import counted
from pipeline.outputs.folder import outputs_of
from pipeline.outputs.lora_lock import hold_lora
from pipeline.recipe import Recipe
from pipeline.trained_lora.export.earlier_step import (
    exportable_run,
    exported_step,
    publish_last_step,
    publish_step,
)
from pipeline.trained_lora.run_folder import RunLayout, hold_idle_run, lora_steps, require_run, run_folder
from pipeline.trained_lora.run_upload import fetch_lora, fetch_run, require_idle_at_address


@click.command(short_help="Publish the LoRA of an earlier step.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
@click.option("--step", type=click.IntRange(1), help="Step to publish. A checkpoint of it must exist.")
@click.option("--latest", is_flag=True, help="Publish the run's last step again.")
@click.option(
    "--run", "run", help="Run to publish from: a folder name in runs/. By default the run of lora/."
)
def command(recipe: Recipe, step: int | None, latest: bool, run: str | None) -> None:
    """Replace the LoRA in the folder lora/ of RECIPE's outputs by the LoRA of an earlier step.

    Every checkpoint of a run holds the LoRA of its step. Without --step and --latest, the command lists these
    steps and changes nothing.

    When a run finishes, it publishes its last step in lora/. So an earlier step stays there until another run
    finishes, or until you publish the last step again with --latest.
    """
    if step is not None and latest:
        raise click.UsageError("--step and --latest exclude each other.")
    run = run or exportable_run(recipe.output_dir)
    layout = RunLayout(run_folder(recipe.output_dir, run))

    # At an address, another machine may be training the run, and files here may be older than files there.
    outputs = outputs_of(recipe)
    if step is not None or latest:
        require_idle_at_address(outputs, run)
        fetch_run(outputs, run)

    if step is not None:
        fetch_lora(outputs, layout, step)
        with hold_idle_run(layout), hold_lora(outputs, echo):
            replaced = publish_step(recipe.output_dir, run, step)
        _report(step, run, replaced)
        revert = f"latentline export {recipe.name} --latest"
        echo(f"it stays until another run finishes, or until {revert}")
    elif latest:
        with hold_idle_run(layout), hold_lora(outputs, echo):
            last_step, replaced = publish_last_step(recipe.output_dir, run, recipe.name)
        _report(last_step, run, replaced)
    else:
        require_run(layout)
        chosen = exported_step(recipe.output_dir, run)
        echo(f"run {run}: LoRA files of {counted(len(lora_steps(layout)), 'step')}")
        for each in lora_steps(layout):
            echo(f"  {each}{' (published)' if each == chosen else ''}")


def _report(step: int, run: str, replaced: list[str]) -> None:
    changes = f"replaced {', '.join(replaced)}" if replaced else "unchanged"
    echo(f"lora/ holds step {step} of run {run}: {changes}")
