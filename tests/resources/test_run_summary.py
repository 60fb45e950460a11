"""The summary of a run; test_recipe_executor.py has when and where a `dagster` command prints it."""

import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import (
    AssetCheckResult,
    AssetCheckSpec,
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
    MaterializeResult,
    asset,
    define_asset_job,
    execute_job,
    executor,
    materialize,
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

from pipeline.errors import RecipeError, TableError
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.reporting.reports import write_report
from resources.failures import Problem, errors_as_failures
from resources.problems import BUG
from resources.run_summary import RunSummary, summarize_run, write_parts, write_summary
from tests.small_recipe import small_recipe

GOOD = RunSummary(["demo_train: done \u2714"], [])
BAD = RunSummary(
    ["demo_train: failed"], [Problem("StoreError: one", "a", "b"), Problem("StoreError: two", "c", "d")]
)


def test_a_good_run_is_written_to_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    write_summary(GOOD)
    assert capfd.readouterr() == ("\ndemo_train: done \u2714\n", "")


def test_all_of_a_bad_run_is_written_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    write_summary(BAD)
    assert capfd.readouterr() == ("", f"\ndemo_train: failed\n\n{BAD.problems[0]}\n\n{BAD.problems[1]}\n")


@pytest.mark.parametrize("summary", [GOOD, BAD])
def test_a_step_of_github_actions_shows_the_summary_on_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summary: RunSummary
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Steps before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    write_summary(summary)
    text = "\n\n".join([*summary.numbers, *map(str, summary.problems)])
    assert page.read_text("utf-8") == f"# Steps before\n```text\n{text}\n```\n"


def test_no_text_of_a_dataset_leaves_the_code_block_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    write_summary(
        RunSummary(
            [], [Problem("DatasetError: a\n```\n<img src=x> https://me:secret@host/x\u202e", "x", "y")]
        )
    )
    shown = page.read_text("utf-8")
    assert shown.startswith("````text\n")
    assert shown.endswith("\n````\n")
    assert "secret" not in shown
    assert "\u202e" not in shown


@pytest.fixture
def github(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def annotations(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("::")]


@pytest.mark.usefixtures("github")
def test_M6_a_failed_step_annotates_its_section_of_the_recipe(
    run_step, small: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    small.source.parent.mkdir(parents=True, exist_ok=True)
    small.source.write_text("datasets: []\n\ntraining: {}\n", encoding="utf-8")
    write_summary(run_step(raises(TableError("no, 100%", where="tables/a.parquet", fix="train"))))
    (line,) = annotations(capfd.readouterr().err)
    file = str(small.source).replace(":", "%3A").replace(",", "%2C")
    text = "TableError: no, 100%25%0A  where: tables/a.parquet%0A  fix:   train"
    assert line == f"::error file={file},line=3,title=Latentline::{text}"


@pytest.mark.usefixtures("github")
def test_M6_an_error_in_a_recipe_annotates_its_own_line(run_step, capfd: pytest.CaptureFixture[str]) -> None:
    error = RecipeError(
        "rank must be at least 1", where="configs/small.yaml:7, training.lora.rank", fix="use 1"
    )
    write_summary(run_step(raises(error)))
    (line,) = annotations(capfd.readouterr().err)
    assert line.startswith("::error file=configs/small.yaml,line=7,title=Latentline::RecipeError")


@pytest.mark.usefixtures("github")
def test_a_problem_without_a_place_is_annotated_without_one_and_no_text_becomes_a_command(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_summary(RunSummary([], [Problem("LaunchError: a\n::set-env name=A::b\r", "x", "y")]))
    lines = annotations(capfd.readouterr().err)
    assert lines[-1].startswith("::error title=Latentline::LaunchError: a%0A::set-env")
    assert "%0D%0A" in lines[-1] or "\\r" in lines[-1]


def test_only_github_actions_gets_annotations(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    write_summary(BAD)
    assert annotations(capfd.readouterr().err) == []


def test_a_page_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    write_summary(GOOD)
    assert capfd.readouterr().out


def test_characters_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    with (tmp_path / "terminal").open("w", encoding="ascii") as stream:
        write_parts(GOOD.numbers, stream)
    assert (tmp_path / "terminal").read_text() == "\ndemo_train: done \\u2714\n"


def test_a_closed_stream_is_not_an_error(tmp_path: Path) -> None:
    with (tmp_path / "terminal").open("w") as stream:
        pass
    write_parts(GOOD.numbers, stream)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(tmp_path / "configs"))
    return small_recipe(tmp_path, "small")


@pytest.fixture
def run_step(small: Recipe, tmp_path: Path) -> Any:
    """Execute a body as a real run of the asset small/<name>, and return the run's summary."""

    def run(body: Any, asset_name: str = "trained_lora") -> RunSummary:
        check = AssetCheckSpec("loss_fell", asset=["small", asset_name], description="d")

        @asset(key=["small", asset_name], name=None, check_specs=[check])
        def step() -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
            body()
            write_report(small.output_dir, asset_name, {"steps": 3, "launched": True, "first_loss": None})
            yield MaterializeResult()
            yield AssetCheckResult(passed=True)

        with DagsterInstance.ephemeral() as instance:
            try:
                run_id = materialize([step], instance=instance, raise_on_error=False).run_id
            except BaseException:
                [record] = instance.get_run_records()
                run_id = record.dagster_run.run_id
            return summarize_run(instance, run_id, [small, small_recipe(tmp_path / "other", "other")])

    return run


def raises(error: BaseException) -> Any:
    def body() -> None:
        with errors_as_failures(recipe="small"):
            raise error

    return body


def test_a_good_run_has_the_numbers_of_its_recipe_and_no_problem(run_step, small: Recipe) -> None:
    summary = run_step(lambda: None)
    assert summary.problems == []
    [numbers] = summary.numbers
    title, *lines = numbers.splitlines()
    assert title.startswith("small: done after"), "a run without a job is titled with its recipe"
    assert lines == [
        "  gates     0 passed, 0 warnings",
        "  training  3 steps",
        f"  LoRA      {small.output_dir}/lora",
        "  next      latentline sample small --step all   draws pictures at each saved step",
        "            latentline export small --step N   publishes the best step in lora/",
    ]


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
    assert "test_run_summary.py" in line
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


def test_a_stopped_run_has_stopped_rather_than_failed(small: Recipe) -> None:
    write_report(small.output_dir, "raw_images", {"in": 3, "kept": 3, "rejected": 0})

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
        summary = summarize_run(instance, run_id, [small], restart="run it again")
    assert summary.stopped
    assert summary.numbers == []
    assert str(summary.problems[0]).endswith("\n  fix:   run it again; finished work is kept")


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
        summary = summarize_run(instance, run.run_id, [small])
    assert not summary.stopped
    problem = str(summary.problems[0])
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
        summary = summarize_run(instance, record.dagster_run.run_id, [small])
    assert not summary.stopped
    assert "no such cluster\n  where: " in str(summary.problems[0])


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
        (problem,) = summarize_run(instance, run.run_id, [small]).problems
    assert problem.what == what
    assert problem.where == "asset small/raw_images"
    assert fix in problem.fix
    assert "memory limit" in problem.fix
    assert problem.fix.endswith("start the job again; finished work is kept")


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
        summary = summarize_run(instance, run_id, [small], problems_only=True)
    assert not summary.stopped
    assert str(summary.problems[0]).splitlines() == [
        "Run timed out due to taking longer than 0 seconds to start.",
        "  where: between two steps",
        "  fix:   start the same job again; finished work is kept",
    ]


def test_a_stopped_cache_job_says_that_finished_work_is_kept(run_step) -> None:
    problem = str(run_step(raises(DagsterExecutionInterruptedError()), "vae_latents").problems[0])
    assert "asset small/vae_latents\n" in problem
    assert problem.endswith("finished work is kept")


def test_reports_at_an_address_that_cannot_be_read_are_missing_from_the_summary(tmp_path: Path) -> None:
    recipe = recipe_from_mapping(
        "small",
        {
            "datasets": [{"name": "photos", "path": tmp_path / "data"}],
            "cache_dir": tmp_path / "cache",
            "output_dir": f"memory://{uuid.uuid4().hex}",
            "model": {"base": "models/none"},
        },
    )
    (recipe.output_dir / ".mirror.lock").mkdir(parents=True)  # in the place of a file

    @asset(key=["small", "raw_images"])
    def scan() -> None: ...

    with DagsterInstance.ephemeral() as instance:
        run_id = materialize([scan], instance=instance).run_id
        assert summarize_run(instance, run_id, [recipe]) == RunSummary([], [])


@pytest.mark.parametrize("name", ["\x1b[2J", "\x9b2J", "\u202egnp", "\x07"])
def test_a_name_in_the_error_of_a_bug_has_escapes(
    run_step, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    def fail() -> None:
        raise ValueError(f"no {name} at sftp://me:pass@host")

    summary = run_step(fail)
    # Dagster's own logger, which jobs do not use, has printed the error as it is.
    capfd.readouterr()
    write_summary(summary)
    error = capfd.readouterr().err
    assert f"no {name.encode('unicode_escape').decode()} at sftp://***@host" in error
    assert name not in error
