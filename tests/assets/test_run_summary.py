"""The summary of a run, and when and where a `dagster` command prints it."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import (
    AssetCheckResult,
    AssetCheckSpec,
    DagsterExecutionInterruptedError,
    DagsterInstance,
    DagsterInvariantViolationError,
    Definitions,
    Executor,
    InitExecutorContext,
    InitLoggerContext,
    JobDefinition,
    LoggerDefinition,
    MaterializeResult,
    asset,
    define_asset_job,
    execute_job,
    executor,
    materialize,
    reconstructable,
)
from sqlalchemy.exc import OperationalError

from assets.problems import BUG
from assets.run_summary import RunSummary, summarize_run
from pipeline.errors import TableError
from pipeline.reporting.reports import write_report
from resources.failures import errors_as_failures

COMMAND = """
import sys
import click
from assets import run_summary

sys.argv = ["dagster", "job", "execute", "-j", "demo_train"]
with click.Context(click.Command("cli"), info_name={program!r}):
    run_summary.print_summary_at_exit()
    run_summary.print_summary_at_exit()
run_summary._summaries["123"] = run_summary.RunSummary({{"demo": "demo_train: done \u2714"}}, [])
{body}
"""

FAILURE = """
run_summary._summaries["123"].problems.extend(["StoreError: one", "StoreError: one", "StoreError: two"])
print("Error: Run 123 resulted in failure.", file=sys.stderr)
sys.exit(1)
"""


def run_command(program: str, body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND.format(program=program, body=body)],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("program", ["dagster", "python -m dagster", "dg"])
def test_each_problem_is_printed_once_after_dagsters_own_last_line(program: str) -> None:
    completed = run_command(program, FAILURE)
    assert completed.returncode == 1
    assert completed.stdout == ""
    summary = "Error: Run 123 resulted in failure.\n\ndemo_train: done \u2714\n"
    assert completed.stderr == f"{summary}\nStoreError: one\n\nStoreError: two\n"


def test_the_numbers_of_a_good_run_are_the_only_text_on_standard_output() -> None:
    """They are printed once, although COMMAND loads the definitions twice, as an executor may."""
    completed = run_command("dagster", "print('log', file=sys.stderr)")
    assert (completed.returncode, completed.stdout, completed.stderr) == (
        0,
        "\ndemo_train: done \u2714\n",
        "log\n",
    )


def test_characters_that_the_terminal_cannot_show_are_escaped() -> None:
    completed = run_command("dagster", "", PYTHONIOENCODING="ascii")
    assert completed.stdout == "\ndemo_train: done \\u2714\n"


def test_a_closed_standard_output_is_not_an_error() -> None:
    completed = run_command("dagster", "import os; os.close(1)")
    assert (completed.returncode, completed.stderr) == (0, "")


@pytest.mark.parametrize("program", ["pytest", "latentline"])
def test_other_programs_that_import_the_definitions_print_nothing(program: str) -> None:
    completed = run_command(program, FAILURE)
    assert (completed.stdout, completed.stderr) == ("", "Error: Run 123 resulted in failure.\n")


def test_a_bug_that_ends_the_command_is_printed_after_its_traceback() -> None:
    completed = run_command("dagster", "raise ValueError('no such job')")
    assert completed.returncode == 1
    assert "Traceback" in completed.stderr
    assert completed.stderr.rsplit("\n\n", 1)[-1].startswith("ValueError: no such job\n")


def test_an_error_that_a_user_can_correct_is_printed_without_a_traceback() -> None:
    completed = run_command("dagster", "raise OSError(28, 'No space left', '/mnt/home/runs.db')")
    assert completed.returncode == 1
    assert "Traceback" not in completed.stderr
    what, where, fix = completed.stderr.rsplit("\n\n", 1)[-1].splitlines()
    assert what == "OSError: [Errno 28] No space left: '/mnt/home/runs.db'"
    assert where == "  where: dagster job execute -j demo_train"
    assert fix.startswith("  fix:   free space on that disk and start the job again")


@pytest.fixture
def run_step(tmp_path) -> Any:
    """Execute a body as a real run of the asset small/<name>, and return the run's summary."""

    def run(body: Any, asset_name: str = "trained_lora") -> RunSummary:
        check = AssetCheckSpec("loss_fell", asset=["small", asset_name], description="d")

        @asset(key=["small", asset_name], name=None, check_specs=[check])
        def step() -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
            body()
            write_report(tmp_path, asset_name, {"steps": 3, "launched": True, "first_loss": None})
            yield MaterializeResult()
            yield AssetCheckResult(passed=True)

        with DagsterInstance.ephemeral() as instance:
            try:
                run_id = materialize([step], instance=instance, raise_on_error=False).run_id
            except BaseException:
                [record] = instance.get_run_records()
                run_id = record.dagster_run.run_id
            return summarize_run(instance, run_id, {"small": tmp_path, "other": Path("/nowhere")})

    return run


def raises(error: BaseException) -> Any:
    def body() -> None:
        with errors_as_failures():
            raise error

    return body


def test_a_good_run_has_the_numbers_of_its_recipe_and_no_problem(run_step, tmp_path) -> None:
    summary = run_step(lambda: None)
    assert summary.problems == []
    assert set(summary.numbers) == {"small"}
    title, *lines = summary.numbers["small"].splitlines()
    assert title.startswith("small: done after"), "a run without a job is titled with its recipe"
    assert lines == [
        "  gates     0 passed, 0 warnings",
        "  training  3 steps",
        f"  LoRA      {tmp_path}/lora",
    ]


def test_an_error_of_ours_keeps_its_text_and_names_the_recipe(run_step) -> None:
    summary = run_step(raises(TableError("no table", where="x.parquet", fix="run <recipe>_cache")))
    assert summary.problems == ["TableError: no table\n  where: x.parquet\n  fix:   run small_cache"]
    assert summary.numbers == {}


def test_a_bug_is_reported_with_the_innermost_error_the_asset_and_the_line(run_step) -> None:
    def body() -> None:
        try:
            _ = 1 // 0
        except ZeroDivisionError as err:
            raise RuntimeError("outer") from err

    [problem] = run_step(body).problems
    what, where, line, fix = problem.splitlines()
    assert what == "ZeroDivisionError: integer division or modulo by zero"
    assert where == "  where: asset small/trained_lora"
    assert "test_run_summary.py" in line
    assert fix.startswith("  fix:   this is a bug")


def test_a_database_that_fails_a_step_is_no_bug(run_step) -> None:
    def body() -> None:
        try:
            raise OperationalError("select 1", {}, Exception("the server is away"))
        except OperationalError as err:
            raise RuntimeError("too many retries for DB connection") from err

    [problem] = run_step(body).problems
    what, where, fix = problem.splitlines()
    assert what.startswith("Dagster's database cannot be used: (builtins.Exception) the server is away")
    assert "DAGSTER_HOME" in where
    assert "`storage` in dagster.yaml" in fix


def complete_checkpoint(run: Path, step: int) -> Path:
    checkpoint = run / "checkpoints" / f"step-{step:08}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    return checkpoint


def test_a_stopped_training_names_the_checkpoint_it_resumes_from(run_step, tmp_path) -> None:
    checkpoint = complete_checkpoint(tmp_path / "runs" / "ab", 4)
    os.utime(checkpoint / "COMPLETE", (1, 1))  # written by an earlier run that this one resumed

    def body() -> None:
        (tmp_path / "runs" / "ab" / "run.json").write_text("{}")
        raise DagsterExecutionInterruptedError

    [problem] = run_step(body).problems
    assert problem.splitlines() == [
        "Stopped: the run was stopped by SIGINT, SIGTERM or Dagster",
        "  where: asset small/trained_lora",
        f"         checkpoint {checkpoint}",
        "  fix:   start the same job again; it resumes from this checkpoint",
    ]


def test_R11_a_stopped_training_names_no_checkpoint_of_another_run(run_step, tmp_path) -> None:
    other = tmp_path / "runs" / "other settings"
    complete_checkpoint(other, 400)
    (other / "run.json").write_text("{}")
    os.utime(other / "run.json", (1, 1))
    [problem] = run_step(raises(DagsterExecutionInterruptedError())).problems
    assert "checkpoint" not in problem
    assert problem.endswith("finished work is kept")


def test_a_stopped_run_has_stopped_rather_than_failed(tmp_path) -> None:
    write_report(tmp_path, "raw_images", {"in": 3, "kept": 3, "rejected": 0})

    @asset(key=["small", "raw_images"])
    def scan() -> None: ...

    @asset(key=["small", "vae_latents"], deps=[["small", "raw_images"]])
    def encode() -> None:
        raise DagsterExecutionInterruptedError

    with DagsterInstance.ephemeral() as instance:
        with pytest.raises(DagsterExecutionInterruptedError):
            materialize([scan, encode], instance=instance)
        [record] = instance.get_run_records()
        run_id = record.dagster_run.run_id
        summary = summarize_run(instance, run_id, {"small": tmp_path}, restart="run it again")
    assert summary.stopped
    assert summary.numbers["small"].startswith("small: stopped after ")
    assert summary.problems[0].endswith("\n  fix:   run it again; finished work is kept")


def failing_logger(error: Exception) -> LoggerDefinition:
    """Return a logger that raises when Dagster starts the first step."""

    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "Executing steps in process" in record.getMessage():
                raise error

    def create(_: InitLoggerContext) -> logging.Logger:
        created = logging.Logger("failing")
        created.addHandler(Failing())
        return created

    return LoggerDefinition(create)


@pytest.mark.parametrize(
    ("error", "what", "fix"),
    [
        (
            OperationalError("select 1", {}, Exception("the server is away")),
            "database",
            "`storage` in dagster",
        ),
        (ValueError("no such step"), "ValueError: no such step", BUG),
    ],
    ids=["database", "bug"],
)
def test_an_error_between_two_steps_is_not_a_stop(
    tmp_path: Path, error: Exception, what: str, fix: str
) -> None:
    @asset(key=["small", "raw_images"])
    def scan() -> None: ...

    job = define_asset_job("small_cache", [scan])
    definitions = Definitions([scan], jobs=[job], loggers={"failing": failing_logger(error)})
    with DagsterInstance.ephemeral() as instance:
        run = definitions.resolve_job_def("small_cache").execute_in_process(
            run_config={"loggers": {"failing": {}}}, instance=instance, raise_on_error=False
        )
        summary = summarize_run(instance, run.run_id, {"small": tmp_path})
    assert not summary.stopped
    [problem] = summary.problems
    first, second, third = problem.splitlines()
    assert what in first
    assert second.startswith("  where: ")
    assert fix in third


@executor
def broken_executor(_: InitExecutorContext) -> Executor:
    raise DagsterInvariantViolationError("no such cluster")


def broken_job() -> JobDefinition:
    @asset(key=["small", "raw_images"])
    def scan() -> None: ...

    jobs = [define_asset_job("small_cache", [scan], executor_def=broken_executor)]
    return Definitions([scan], jobs=jobs).resolve_job_def("small_cache")


def test_a_run_that_cannot_be_initialized_is_not_a_stop(tmp_path: Path) -> None:
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        execute_job(reconstructable(broken_job), instance)
        [record] = instance.get_run_records()
        summary = summarize_run(instance, record.dagster_run.run_id, {"small": tmp_path})
    assert not summary.stopped
    assert "no such cluster\n  where: " in summary.problems[0]


def test_a_stopped_cache_job_says_that_finished_work_is_kept(run_step) -> None:
    [problem] = run_step(raises(DagsterExecutionInterruptedError()), "vae_latents").problems
    assert "asset small/vae_latents\n" in problem
    assert problem.endswith("finished work is kept")
