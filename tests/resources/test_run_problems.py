"""The problems of runs: of failed, stopped and killed steps, and of what ends a run between two steps."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dagster import (
    DagsterEvent,
    DagsterExecutionInterruptedError,
    DagsterInstance,
    DagsterInvariantViolationError,
    Definitions,
    Executor,
    ExecutorDefinition,
    InitExecutorContext,
    InitLoggerContext,
    JobDefinition,
    LoggerDefinition,
    asset,
    define_asset_job,
    execute_job,
    executor,
    multiprocess_executor,
    reconstructable,
)
from dagster._core.execution.retries import RetryMode
from dagster._core.executor.step_delegating import (
    CheckStepHealthResult,
    StepDelegatingExecutor,
    StepHandler,
    StepHandlerContext,
)
from dagster._daemon.monitoring.run_monitoring import monitor_starting_run
from sqlalchemy.exc import OperationalError

from pipeline.errors import TableError
from pipeline.recipe import Recipe
from resources.failures import Problem
from resources.problems import BUG
from resources.run_problems import run_problems
from tests.resources.small_runs import raises


def test_an_error_of_ours_keeps_its_text_and_names_the_recipe(run_step) -> None:
    summary = run_step(raises(TableError("no table", where="x.parquet", fix="run <recipe>_cache")))
    assert summary.problems == [Problem("TableError: no table", "x.parquet", "run small_cache")]
    assert summary.numbers == []


def test_a_bug_is_reported_with_the_innermost_error_the_asset_and_the_line(run_step) -> None:
    def body() -> None:
        try:
            _ = 1 // 0
        except ZeroDivisionError as err:
            raise RuntimeError("outer") from err

    problem = str(run_step(body).problems[0])
    what, where, line, fix = problem.splitlines()
    assert what == "ZeroDivisionError: integer division or modulo by zero"
    assert where == "  where: asset small/trained_lora"
    assert Path(__file__).name in line
    assert fix.startswith("  fix:   this is a bug")


def test_a_database_that_fails_a_step_is_no_bug(run_step) -> None:
    def body() -> None:
        try:
            raise OperationalError("select 1", {}, Exception("the server is away"))
        except OperationalError as err:
            raise RuntimeError("too many retries for DB connection") from err

    problem = str(run_step(body).problems[0])
    what, where, fix = problem.splitlines()
    assert what.startswith("Dagster's database cannot be used: (builtins.Exception) the server is away")
    assert "DAGSTER_HOME" in where
    assert "`storage` in dagster.yaml" in fix


def complete_checkpoint(run: Path, step: int) -> Path:
    checkpoint = run / "checkpoints" / f"step-{step:08}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    return checkpoint


def test_a_stopped_training_names_the_checkpoint_it_resumes_from(run_step, small: Recipe) -> None:
    run = small.output_dir / "runs" / "ab"
    checkpoint = complete_checkpoint(run, 4)
    os.utime(checkpoint / "COMPLETE", (1, 1))  # written by an earlier run that this one resumed

    def body() -> None:
        (run / "run.json").write_text("{}")
        raise DagsterExecutionInterruptedError

    problem = str(run_step(body).problems[0])
    assert problem.splitlines() == [
        "Stopped: the run was stopped by SIGINT, SIGTERM or Dagster",
        "  where: asset small/trained_lora",
        f"         checkpoint {checkpoint}",
        "  fix:   start the same job again; it resumes from this checkpoint",
    ]


def test_R11_a_stopped_training_names_no_checkpoint_of_another_run(run_step, small: Recipe) -> None:
    other = small.output_dir / "runs" / "other settings"
    complete_checkpoint(other, 400)
    (other / "run.json").write_text("{}")
    os.utime(other / "run.json", (1, 1))
    problem = str(run_step(raises(DagsterExecutionInterruptedError())).problems[0])
    assert "checkpoint" not in problem
    assert problem.endswith("finished work is kept")


def test_a_stopped_cache_job_says_that_finished_work_is_kept(run_step) -> None:
    problem = str(run_step(raises(DagsterExecutionInterruptedError()), "vae_latents").problems[0])
    assert "asset small/vae_latents\n" in problem
    assert problem.endswith("finished work is kept")


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
    small: Recipe, error: Exception, what: str, fix: str
) -> None:
    @asset(key=["small", "raw_images"])
    def scan() -> None: ...

    job = define_asset_job("small_cache", [scan])
    definitions = Definitions([scan], jobs=[job], loggers={"failing": failing_logger(error)})
    with DagsterInstance.ephemeral() as instance:
        run = definitions.resolve_job_def("small_cache").execute_in_process(
            run_config={"loggers": {"failing": {}}}, instance=instance, raise_on_error=False
        )
        found = run_problems(instance, run.run_id, [small])
    assert not found.stopped
    problem = str(found.problems[0])
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


def test_a_run_that_cannot_be_initialized_is_not_a_stop(small: Recipe, tmp_path: Path) -> None:
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        execute_job(reconstructable(broken_job), instance)
        [record] = instance.get_run_records()
        found = run_problems(instance, record.dagster_run.run_id, [small])
    assert not found.stopped
    assert "no such cluster\n  where: " in str(found.problems[0])


def test_a_run_that_did_not_start_in_time_has_the_message_of_dagster_s_run_monitoring(
    small: Recipe, tmp_path: Path
) -> None:
    settings = "run_monitoring: {enabled: true, start_timeout_seconds: 0}\n"
    (tmp_path / "dagster.yaml").write_text(settings, encoding="utf-8")
    with DagsterInstance.from_config(str(tmp_path)) as instance:
        run_id = instance.create_run_for_job(broken_job()).run_id
        start = DagsterEvent(event_type_value="PIPELINE_STARTING", job_name="small_cache")
        instance.report_dagster_event(start, run_id)
        record = instance.get_run_record_by_id(run_id)
        assert record is not None
        monitor_starting_run(instance, record, logging.getLogger("monitoring"))
        found = run_problems(instance, run_id, [small])
    assert not found.stopped
    assert str(found.problems[0]).splitlines() == [
        "Run timed out due to taking longer than 0 seconds to start.",
        "  where: between two steps",
        "  fix:   start the same job again; finished work is kept",
    ]


class ProcessPerStep(StepHandler):
    """Starts a process for each step, as Dagster's handler for Kubernetes starts a pod."""

    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return "process per step"

    def launch_step(self, step_handler_context: StepHandlerContext) -> Iterator[DagsterEvent]:
        _, *arguments = step_handler_context.execute_step_args.get_command_args()
        command = [sys.executable, "-m", "dagster", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        yield from ()

    def check_step_health(self, step_handler_context: StepHandlerContext) -> CheckStepHealthResult:
        status = self.process.poll()
        if status is None or status == 0:
            return CheckStepHealthResult.healthy()
        return CheckStepHealthResult.unhealthy(f"exit status {status}")

    def terminate_step(self, step_handler_context: StepHandlerContext) -> Iterator[DagsterEvent]:
        self.process.kill()
        yield from ()


@executor
def process_per_step_executor(_: InitExecutorContext) -> Executor:
    return StepDelegatingExecutor(
        ProcessPerStep(), RetryMode.DISABLED, sleep_seconds=0.1, check_step_health_interval_seconds=0
    )


def killed_job(executor_def: ExecutorDefinition) -> JobDefinition:
    @asset(key=["small", "raw_images"])
    def scan() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    jobs = [define_asset_job("small_cache", [scan], executor_def=executor_def)]
    return Definitions([scan], jobs=jobs).resolve_job_def("small_cache")


def job_in_killed_process() -> JobDefinition:
    return killed_job(multiprocess_executor)


def job_in_killed_container() -> JobDefinition:
    return killed_job(process_per_step_executor)


@pytest.mark.parametrize(
    ("job", "what", "fix"),
    [
        (job_in_killed_process, "the process of the step ended without reporting an error", "SIGKILL"),
        (
            job_in_killed_container,
            "the process or pod of the step ended without reporting an error: exit status -9",
            "`kubectl describe pod`",
        ),
    ],
)
def test_a_step_that_is_killed_is_no_bug_of_latentline(
    small: Recipe, tmp_path: Path, job: Callable[[], JobDefinition], what: str, fix: str
) -> None:
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        run = execute_job(reconstructable(job), instance)
        (problem,) = run_problems(instance, run.run_id, [small]).problems
    assert problem.what == what
    assert problem.where == "asset small/raw_images"
    assert fix in problem.fix
    assert "memory limit" in problem.fix
    assert problem.fix.endswith("start the job again; finished work is kept")
