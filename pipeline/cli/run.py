"""`latentline run`: execute the jobs of recipes, with progress and a summary on the terminal."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from pipeline.cli.conventions import RECIPE, echo
from pipeline.cli.json_output import give, is_json
from pipeline.errors import RUN_RECIPE, FileAccessError, counted
from pipeline.processes.launch import python_path
from pipeline.recipe import Recipe, project_root
from pipeline.recipe.load import CONFIGS_VARIABLE
from pipeline.reporting.progress import duration_text
from pipeline.reporting.terminal import TERMINAL_VARIABLE
from pipeline.storage.addresses import expanded

HOME_VARIABLE = "DAGSTER_HOME"

RUN_MODULE = "assets.run"
"""Module that executes the job. It imports Dagster, so this package only starts it by name."""

STOPPED_STATUS = 130
"""Exit status of a command that Ctrl-C ended."""


@click.command(short_help="Encode what the cache lacks, and train the LoRA.")
@click.argument("recipes", metavar="RECIPE...", type=RECIPE, nargs=-1, required=True)
@click.option("--cache-only", is_flag=True, help="Stop before training: execute only the cache jobs.")
@click.option("--stop", is_flag=True, help="With several recipes, stop after the first that fails.")
@click.option(
    "--continue",
    "continue_run",
    metavar="RUN",
    help="After a change of the data: begin with weights, optimizer and steps of this run, a folder name in "
    "runs/, or of the latest one.",
)
def command(recipes: tuple[Recipe, ...], cache_only: bool, stop: bool, continue_run: str | None) -> None:
    """Check the images and captions of RECIPE, encode those that the cache lacks, and train the LoRA.

    Several recipes run one after the other, and a failure does not stop the others. All of them are read
    before the first one starts.

    Ctrl-C stops the run after a checkpoint. The same command resumes it. If you correct a caption or an image
    in the middle of a training, `latentline run RECIPE --continue latest` goes on at its newest checkpoint.

    The run is the Dagster job RECIPE_train, or RECIPE_cache with --cache-only, in the instance of the project
    (.dagster/), so that `make ui` shows it. DAGSTER_HOME selects another instance.

    The exit status is 0 if all jobs finished, 1 after an error or if a check stopped a job, and 130 if you
    stopped it.
    """
    if continue_run is not None and cache_only:
        raise click.UsageError("--continue and --cache-only exclude each other.")
    if continue_run not in (None, "latest") and len(recipes) > 1:
        raise click.UsageError("A run belongs to one recipe; use --continue latest for several recipes.")
    home = dagster_home()
    more = [] if continue_run is None else [continue_run]
    if len(recipes) == 1 and not is_json():
        # The imports of the job take seconds.
        _show(f"starting {recipes[0].name}", err=True)
        os.environ.update(_job_environment(recipes[0], home))
        sys.argv = [*_job(recipes[0], cache_only=cache_only), *more]
        # A folder assets/ in the working directory, as Dagster projects have it, must not hide the module.
        sys.path[:0] = python_path().split(os.pathsep)
        # In this process, so that signals and the exit status need no forwarding. It ends the process.
        runpy.run_module(RUN_MODULE, run_name="__main__", alter_sys=True)

    names = [recipe.name for recipe in recipes]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise click.UsageError(f"Each recipe runs once; remove the repetition of {', '.join(repeated)}.")
    results = _run_in_turn(recipes, home, more, cache_only=cache_only, stop=stop)
    _show("\n" + results_text(recipes, results, cache_only=cache_only))
    give({"recipes": [_values(recipe, results.get(recipe.name)) for recipe in recipes]})
    sys.exit(_status(recipes, results))


def _values(recipe: Recipe, result: JobResult | None) -> dict[str, Any]:
    """Return the outcome of a recipe, and the reports and failed checks of the assets that it reached."""
    values = {"recipe": recipe.name, "outcome": _outcome(result), "output_dir": recipe.registered_output}
    if result is None:
        return values
    content = {"errors": [], "reports": {}, "checks": {}, **result.content}
    return {**values, "status": result.status, "seconds": result.seconds, **content}


def _show(text: str, *, err: bool = False) -> None:
    """Print a line, unless the stream's reader has gone away, which must not stop or fail the runs."""
    try:
        echo(text, err=err)
    except OSError:
        stream = sys.stderr if err else sys.stdout
        # What is left in the buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@dataclass(frozen=True)
class JobResult:
    """How the job of one of several recipes ended.

    Attributes:
        status: Exit status of the job.
        content: With `--json`, what `assets.run` has written to its result file.
    """

    status: int
    seconds: float
    content: Mapping[str, Any] = field(default_factory=dict[str, Any])


def _run_in_turn(
    recipes: Sequence[Recipe], home: Path, more: Sequence[str], *, cache_only: bool, stop: bool
) -> dict[str, JobResult]:
    """Execute the jobs, and return the results of those that were started, by recipe."""
    results: dict[str, JobResult] = {}
    for number, recipe in enumerate(recipes, start=1):
        if number > 1:
            _show("", err=True)
        _show(f"starting {recipe.name}, {number} of {len(recipes)}", err=True)
        started_s = time.monotonic()
        # Without the working directory in Python's path, see `command`.
        arguments = [sys.executable, "-P", "-m", *_job(recipe, cache_only=cache_only)]
        with tempfile.TemporaryDirectory(prefix="latentline-") as folder:
            file = Path(folder) / "result.json"
            # Without a run to continue, its place is empty.
            arguments += [*(more or [""]), str(file)] if is_json() else more
            status = _run_and_wait(arguments, os.environ | _job_environment(recipe, home))
            content = json.loads(file.read_bytes()) if file.exists() else {}
        results[recipe.name] = JobResult(status, time.monotonic() - started_s, content)
        if status == STOPPED_STATUS or (status and stop):
            break
    return results


def _run_and_wait(arguments: list[str], environment: Mapping[str, str]) -> int:
    with _with_forwarded_signals(arguments, environment) as process:
        status = process.wait()
    # A process that a signal ended has its negative number as status.
    return STOPPED_STATUS if status in (-signal.SIGINT, -signal.SIGTERM) else abs(status)


@contextmanager
def _with_forwarded_signals(
    arguments: list[str], environment: Mapping[str, str]
) -> Generator[subprocess.Popen[bytes]]:
    """Start a process that gets SIGTERM, and SIGINT unless a terminal sends it to all of its processes."""
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _: object) -> None:
        # Ctrl-C reaches the job itself, which saves a checkpoint and ends.
        if number == signal.SIGINT and TERMINAL_VARIABLE in os.environ:
            return
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # With --json, the document alone is on standard output, and the job's summary on standard error.
        process = subprocess.Popen(arguments, env=environment, stdout=2 if is_json() else None)
        for number in early:
            process.send_signal(number)
        yield process
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _job(recipe: Recipe, *, cache_only: bool) -> list[str]:
    """Return the module that executes the recipe's job, and its arguments."""
    return [RUN_MODULE, str(recipe.source), f"{recipe.name}_{'cache' if cache_only else 'train'}"]


def _job_environment(recipe: Recipe, home: Path) -> dict[str, str]:
    return {
        HOME_VARIABLE: str(home),
        CONFIGS_VARIABLE: str(recipe.source.parent),
        "PYTHONPATH": python_path(),
    }


def results_text(
    recipes: Sequence[Recipe], results: Mapping[str, JobResult], *, cache_only: bool = False
) -> str:
    """Return a line for all recipes, and one for each with its outcome, its time and its LoRA."""
    outcomes = {recipe.name: _outcome(results.get(recipe.name)) for recipe in recipes}
    number_of = {
        outcome: list(outcomes.values()).count(outcome) for outcome in dict.fromkeys(outcomes.values())
    }
    counts = ", ".join(f"{number} {outcome}" for outcome, number in number_of.items())
    lines = [f"{counted(len(recipes), 'recipe')}: {counts}"]

    name_width, outcome_width = (max(map(len, texts)) for texts in (outcomes, number_of))
    for recipe in recipes:
        result, outcome = results.get(recipe.name), outcomes[recipe.name]
        line = f"  {recipe.name:<{name_width}}  {outcome:<{outcome_width}}"
        line += f"  {'' if result is None else duration_text(result.seconds):>8}"
        if outcome == "done" and not cache_only:
            line += f"  {recipe.registered_output}/lora"
        lines.append(line.rstrip())
    if unfinished := [name for name, outcome in outcomes.items() if outcome != "done"]:
        options = " --cache-only" if cache_only else ""
        lines.append(f"  to continue: {RUN_RECIPE} {' '.join(unfinished)}{options}")
    return "\n".join(lines)


def _outcome(result: JobResult | None) -> str:
    if result is None:
        return "not started"
    return {0: "done", STOPPED_STATUS: "stopped"}.get(result.status, "failed")


def _status(recipes: Sequence[Recipe], results: Mapping[str, JobResult]) -> int:
    statuses = [result.status for result in results.values()]
    if STOPPED_STATUS in statuses:
        return STOPPED_STATUS
    return 1 if any(statuses) or len(results) < len(recipes) else 0


def dagster_home() -> Path:
    """Return the existing folder of the Dagster instance: `DAGSTER_HOME`, or `.dagster` in the project."""
    chosen = os.environ.get(HOME_VARIABLE, "")
    folder = expanded(chosen).absolute() if chosen else project_root() / ".dagster"
    if not folder.is_dir():
        raise FileAccessError(
            f"the folder of the Dagster instance does not exist: {folder}",
            where=f"environment variable {HOME_VARIABLE}" if chosen else str(project_root()),
            fix=f"create the folder, or unset {HOME_VARIABLE} to use {project_root() / '.dagster'}"
            if chosen
            else "restore the folder .dagster: git checkout -- .dagster in a checkout, or copy it from a new "
            "folder that latentline init writes",
        )
    return folder
