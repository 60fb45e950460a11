"""`latentline evaluate`: draw pictures with each step of a run, score them, and choose a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo, log_to_stderr
from pipeline.cli.optional_stage import run_stage
from pipeline.cli.sample import STOPPED_STATUS
from pipeline.cli.step_options import step_options
from pipeline.recipe import Recipe

if TYPE_CHECKING:
    from pipeline.evaluation.prepare import Request
    from pipeline.reporting.reports import Report


@click.command(short_help="Score the steps of a run, and choose one.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
@step_options(run="Run to evaluate", steps="Steps to evaluate. By default evaluation.steps.")
@click.option(
    "--prompt-set",
    "file",
    type=click.Path(path_type=Path),
    help="YAML file with prompts: and a list as in evaluation.prompts, to use instead. The results are in "
    "reports/prompt_sets/, in a folder with the file's name.",
)
def command(recipe: Recipe, run: str | None, steps: Any, file: Path | None) -> None:
    """Draw pictures with each step of a run of RECIPE, score them, and choose a step.

    Prompts, number of pictures and scorers are in the section evaluation of the recipe. Without the section,
    its defaults apply.

    Pictures and their features are entries of the cache. So what was drawn and computed before is reused, and
    an evaluation that was stopped continues where it ended.
    """
    from pipeline.evaluation.prepare import Request, prompt_set_folder
    from pipeline.recipe.prompt_set import load_prompt_set

    prompt_set = None if file is None else load_prompt_set(file.absolute())
    try:
        report = _evaluate(recipe, Request(run=run, steps=steps or None, prompt_set=prompt_set))
    except KeyboardInterrupt:
        echo("\nStopped. Pictures that are complete are in the cache.", err=True)
        echo("  fix:   run the command again, which draws the others", err=True)
        sys.exit(STOPPED_STATUS)
    _show(report)

    # A prompt set has a report of its own, which the option --best does not read.
    choice = f"--step {report['chosen_step']}" if prompt_set else "--best"
    if report["decided"] and "published" not in report:
        export = f"latentline export {recipe.name} {choice}" + (f" --run {run}" if run else "")
        echo(f"{export} publishes it")
    folder = recipe.output_dir / "reports" / "evaluation"
    folder = folder if prompt_set is None else prompt_set_folder(recipe.output_dir, prompt_set)
    echo(f"pictures and report: {folder}")


def _evaluate(recipe: Recipe, request: Request) -> Report:
    """Evaluate as the asset does; the results of a prompt set are in a folder of their own."""
    from pipeline.evaluation import checks
    from pipeline.evaluation.stage import ASSET, evaluate
    from pipeline.raw_images.shards import unpack_shards

    # The job has unpacked them, but perhaps on another machine.
    unpack_shards(recipe, log=log_to_stderr, only_new=True)
    return run_stage(
        recipe,
        ASSET,
        lambda tables, launch: evaluate(recipe, request, tables, launch=launch, log=log_to_stderr),
        checks.run,
        aside=None if request.prompt_set is None else f"prompt_sets/{request.prompt_set.name}",
    )


def _show(report: Report) -> None:
    from pipeline.evaluation.numbers import NUMBERS

    echo(f"{'step':>8} {'strength':>8}" + "".join(f" {name:>24}" for name in NUMBERS))
    for step in report["steps"]:
        numbers = "".join(f" {_interval_text(step[name]):>24}" for name in NUMBERS)
        echo(f"{step['step']:>8,} {step['strength']:>8g}{numbers}")
    for name, reason in report["absent"].items():
        echo(f"{name} is not measured: {reason}")
    echo(report["why"])
    if "published" in report:
        echo(report["published"])


def _interval_text(number: dict[str, Any] | None) -> str:
    if number is None:
        return "-"
    if number["low"] is None:
        return f"{number['mean']:.3f}"
    return f"{number['mean']:.3f} ({number['low']:.3f} to {number['high']:.3f})"
