"""`latentline export`: publish the LoRA of an earlier step."""

from __future__ import annotations

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo, log_to_stderr
from pipeline.cli.json_output import give
from pipeline.errors import TrainingError, counted
from pipeline.recipe import Recipe
from pipeline.reporting.reports import read_report, report_path
from pipeline.trained_lora.export.earlier_step import (
    ExportedStep,
    exportable_run,
    exported_step,
    publish_last_step,
    publish_step,
)
from pipeline.trained_lora.export.lora_files import lora_file_names
from pipeline.trained_lora.run_folder import RunLayout, lora_steps, require_run, run_folder
from pipeline.trained_lora.run_upload import replacing_lora


@click.command(short_help="Publish the LoRA of an earlier step.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
@click.option("--step", type=click.IntRange(1), help="Step to publish. A checkpoint of it must exist.")
@click.option("--best", is_flag=True, help="Publish the step that the last evaluation of the run has chosen.")
@click.option("--latest", is_flag=True, help="Publish the run's last step again.")
@click.option(
    "--run", "run", help="Run to publish from: a folder name in runs/. By default the run of lora/."
)
def command(recipe: Recipe, step: int | None, best: bool, latest: bool, run: str | None) -> None:
    """Replace the LoRA in the folder lora/ of RECIPE's outputs by the LoRA of an earlier step.

    Every checkpoint of a run holds the LoRA of its step. Without --step, --best and --latest, the command
    lists these steps and changes nothing.

    When a run finishes, it publishes its last step in lora/. So an earlier step stays there until another run
    finishes, or until you publish the last step again with --latest.
    """
    if (step is not None) + best + latest > 1:
        raise click.UsageError("--step, --best and --latest exclude each other.")
    run = run or exportable_run(recipe.output_dir)

    if latest:
        with replacing_lora(recipe, run, log_to_stderr):
            last_step, replaced = publish_last_step(recipe.output_dir, run, lora_file_names(recipe))
        _report(last_step, run, replaced)
        if recipe.publishes_best:
            echo("evaluation.publish is best, so the next evaluation publishes its choice again")
    elif step is not None or best:
        exported = _chosen(recipe, run) if step is None else ExportedStep(run, step)
        with replacing_lora(recipe, run, log_to_stderr, step=exported.step):
            replaced = publish_step(recipe.output_dir, exported)
        _report(exported.step, run, replaced, why=exported.why)
        if exported.why:
            echo(exported.why)
        revert = f"latentline export {recipe.name} --latest"
        echo(f"it stays until another run finishes, or until {revert}")
    else:
        _list(recipe, run)


def _list(recipe: Recipe, run: str) -> None:
    layout = RunLayout(run_folder(recipe.output_dir, run))
    require_run(layout)
    exported = exported_step(recipe.output_dir, run)
    steps = lora_steps(layout)
    published = exported.step if exported is not None else None
    give({"run": run, "steps": [*steps], "published": published})
    echo(f"run {run}: LoRA files of {counted(len(steps), 'step')}")
    for each in steps:
        echo(f"  {each}{' (published)' if each == published else ''}")


def _chosen(recipe: Recipe, run: str) -> ExportedStep:
    """Return the step that the last evaluation has chosen; raises TrainingError unless it is of this run."""
    where = str(report_path(recipe.output_dir, "evaluation"))
    evaluate = f"latentline evaluate {recipe.name}"
    report = read_report(recipe.output_dir, "evaluation")
    if report is None or report.get("run") != run:
        other = f", the last one is of run {report['run']}" if report and report.get("run") else ""
        fix = f"evaluate the run: {evaluate} --run {run}"
        raise TrainingError(f"run {run} has no evaluation{other}", where=where, fix=fix)

    step, why = report.get("chosen_step"), report.get("why")
    if step is None and isinstance(why, str):
        fix = f"choose a step: latentline export {recipe.name} --step N; or draw more pictures with "
        fix += f"evaluation.pictures, then {evaluate} --run {run}"
        raise TrainingError(f"the evaluation has chosen no step: {why}", where=where, fix=fix)
    if type(step) is not int or not isinstance(why, str):
        raise TrainingError(
            "the report of the evaluation is damaged", where=where, fix=f"run {evaluate} --run {run} again"
        )
    return ExportedStep(run, step, why)


def _report(step: int, run: str, replaced: list[str], *, why: str = "") -> None:
    give({"run": run, "step": step, "replaced": replaced, "why": why})
    changes = f"replaced {', '.join(replaced)}" if replaced else "unchanged"
    echo(f"lora/ holds step {step} of run {run}: {changes}")
