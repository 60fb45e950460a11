"""`python -m assets.run <recipe file> <job> [<run to continue> [<result file>]]`: for `latentline run`.

The run is the same as with `dagster job execute`. Only the output differs: resources/terminal_log.py shows
the progress, and this module prints the summary. The UI has the complete log.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pipeline.errors import RUN_RECIPE
from pipeline.processes.imports import collector_paused

if TYPE_CHECKING:
    from dagster import DagsterInstance, JobDefinition

    from pipeline.recipe import Recipe
    from pipeline.reporting.summary import RunResult
    from resources.failures import Problem
    from resources.run_summary import RunSummary

FAILED_STATUS = 1
STOPPED_STATUS = 130
"""Exit status that shells give to a command which Ctrl-C ended."""


def load_job(name: str) -> "JobDefinition":
    """Return a job of the project; an executor that starts processes calls this in each of them."""
    from assets.definitions import defs

    return defs().resolve_job_def(name)


def main(
    recipe_file: Path, job_name: str, continue_run: str | None = None, result_file: str | None = None
) -> int:
    """Execute the job, print what it did or what stopped it, and return the exit status.

    A result file gets the errors as JSON, and the reports and findings of the assets that the run reached.
    """
    # The terminal is gone, for example with its SSH session. `nohup` makes this process ignore it.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _terminate)

    continue_run = continue_run or None
    command = _command(job_name) + (f" --continue {continue_run}" if continue_run else "")
    try:
        return _run(recipe_file, job_name, command, continue_run, result_file)
    except KeyboardInterrupt:
        # Dagster handles interruptions of the run itself. This one may have interrupted an import.
        stopped = "Stopped: the command was stopped before the run started"
        sys.stderr.write(f"\n{stopped}\n  where: {command}\n  fix:   run it again\n")
        return STOPPED_STATUS


def _terminate(number: int, frame: object) -> None:
    """Stop the run as SIGTERM does, which Dagster handles: a training saves a checkpoint first."""
    del number, frame
    os.kill(os.getpid(), signal.SIGTERM)


def _run(
    recipe_file: Path, job_name: str, command: str, continue_run: str | None, result_file: str | None
) -> int:
    with collector_paused():
        from pipeline.recipe import load_recipe
        from resources.imports_ahead import imports_ahead

    try:
        # Before Dagster is imported, which takes as long, also by the modules below.
        with _noted_interrupts() as interrupts, imports_ahead(load_recipe(recipe_file), _assets(job_name)):
            summary = _execute(recipe_file, job_name, command, continue_run, interrupts)
    except Exception as err:
        from resources.problems import REPORT, error_problem
        from resources.written_summary import write_parts

        problem = error_problem(err, command)
        traces = [traceback.format_exc().rstrip()] if REPORT in problem.fix else []
        write_parts([*traces, str(problem)], sys.stderr)
        if result_file is not None:
            write_result(Path(result_file), [problem], [])
        return FAILED_STATUS

    from resources.written_summary import write_summary

    write_summary(summary)
    if result_file is not None:
        write_result(Path(result_file), summary.problems, summary.results)
    if summary.stopped:
        return STOPPED_STATUS
    return FAILED_STATUS if summary.problems else 0


def write_result(file: Path, problems: "Sequence[Problem]", results: "Sequence[RunResult]") -> None:
    """Write problems, reports and failed checks of a run for `latentline run --json`."""
    from pipeline.escaping import without_secrets
    from pipeline.recipe.check_specs import PATH_ISOLATION
    from pipeline.reporting.findings import read_failed_checks

    errors = [{name: without_secrets(text) for name, text in vars(problem).items()} for problem in problems]
    content: dict[str, Any] = {"errors": errors, "reports": {}, "checks": {}}
    for result in results:
        content["reports"] = dict(result.reports)
        # The events name the assets that this run has checked; the files also have the samples. The isolation
        # of paths is checked before the work of the first asset, whose file may be of an earlier run then.
        checked = (check.asset for check in result.checks if check.name != PATH_ISOLATION.name)
        assets = dict.fromkeys(checked)
        content["checks"] = {asset: read_failed_checks(result.output_dir, asset) for asset in assets}
    file.write_text(json.dumps(content, default=str), encoding="utf-8")


def _assets(job_name: str) -> list[str]:
    """Return the assets of a job that launch processes."""
    _, _, kind = job_name.rpartition("_")
    return ["vae_latents", "text_embeddings", *(["trained_lora"] if kind == "train" else [])]


def _execute(
    recipe_file: Path, job_name: str, command: str, continue_run: str | None, interrupts: list[int]
) -> "RunSummary":
    """Execute the job with the terminal logger, and return the summary of the run."""
    with collector_paused():
        from dagster import in_process_executor

        from pipeline.recipe import load_recipe
        from resources.dead_runs import end_dead_runs
        from resources.open_databases import open_databases
        from resources.run_summary import summarize_run

        # The definitions look for the terminal on standard error, so they load before it is redirected.
        in_process = load_job(job_name).executor_def.name == in_process_executor.name
        recipe = load_recipe(recipe_file)

    with _open_instance() as instance, open_databases():
        # A dead run would keep its place in the pool, and this run would wait for it.
        end_dead_runs(instance)

        # Python may have discarded the exception of an interruption during the imports.
        if interrupts:
            raise KeyboardInterrupt
        config = _run_config(recipe, continue_run)
        run_id, stop = _show(instance, job_name, config, command, in_process=in_process)
        return summarize_run(instance, run_id, [recipe], error=stop, restart=f"run {command} again")


def _show(
    instance: "DagsterInstance", job_name: str, config: dict[str, Any], command: str, *, in_process: bool
) -> tuple[str, BaseException | None]:
    """Execute the job while the terminal shows it; return the run, and what interrupted it or None.

    Raises:
        KeyboardInterrupt: The run was interrupted before it had an id.
    """
    from dagster import DagsterExecutionInterruptedError, build_reconstructable_job, execute_job

    from resources.recipe_executor import COMMAND_TAG
    from resources.terminal_log import last_remaining_times, show_run

    job = build_reconstructable_job("assets.run", "load_job", reconstructable_args=(job_name,))
    stop: BaseException | None = None
    remaining_s: dict[str, float] = {}
    with suppress(Exception):  # the run itself reports a database that is away
        remaining_s = last_remaining_times(instance, job_name)
    events = None if in_process else instance
    with _redirected_output() as stream, show_run(stream, events, remaining_s=remaining_s) as handler:
        try:
            execute_job(job, instance, run_config=config, tags={COMMAND_TAG: command})
        except (DagsterExecutionInterruptedError, KeyboardInterrupt) as err:
            if handler.run_id is None:
                raise KeyboardInterrupt from None
            stop = err
    return str(handler.run_id), stop


def _run_config(recipe: "Recipe", continue_run: str | None) -> dict[str, Any]:
    from pipeline.recipe.overrides import CONTINUE
    from resources.step_names import step_name
    from resources.terminal_log import TERMINAL_LOGGER

    config: dict[str, Any] = {"loggers": {TERMINAL_LOGGER: {}}}
    if continue_run is not None:
        config["ops"] = {step_name(recipe.name, "trained_lora"): {"config": {CONTINUE: continue_run}}}
    return config


@contextmanager
def _noted_interrupts() -> Generator[list[int]]:
    """Add each SIGINT to a list, besides raising KeyboardInterrupt as usual."""
    # Python discards an exception that is raised in a destructor or a callback. Imports run many of them, so
    # Ctrl-C during the start could be lost.
    interrupts: list[int] = []

    def note(number: int, _: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)


def _open_instance() -> "DagsterInstance":
    from dagster import DagsterInstance
    from filelock import FileLock

    # Two commands that create the database at the same time would make it unreadable.
    with FileLock(Path(os.environ["DAGSTER_HOME"]) / "latentline.lock"):
        return DagsterInstance.get()


@contextmanager
def _redirected_output() -> Generator[TextIO]:
    """Discard what is written to standard output and error, and provide the original standard error."""
    # Dagster captures the output of each step for the UI and copies it to standard error, with the help of
    # two processes; one of them prints a traceback when it receives Ctrl-C. The terminal shows none of this.
    sys.stdout.flush()
    sys.stderr.flush()
    saved_stdout, saved_stderr = os.dup(1), os.dup(2)
    discard = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(discard, 1)
        os.dup2(discard, 2)
        stream = open(  # noqa: SIM115 - its end may fail
            saved_stderr, "w", encoding=sys.stderr.encoding, errors="backslashreplace", closefd=False
        )
        try:
            yield stream
        finally:
            # Nobody may read the rest, for example after `2>&1 | head -1`, which must not fail the run.
            with suppress(OSError):
                stream.close()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved_stdout, 1)
        os.dup2(saved_stderr, 2)
        for descriptor in (saved_stdout, saved_stderr, discard):
            os.close(descriptor)


def _command(job_name: str) -> str:
    """Return the `latentline` command that executes a job."""
    recipe, _, kind = job_name.rpartition("_")
    return f"{RUN_RECIPE} {recipe}" + (" --cache-only" if kind == "cache" else "")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
