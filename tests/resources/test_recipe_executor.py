"""The summary of `dagster job execute` for a small job in files of its own, with each kind of executor."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus

from resources.run_worker import MACHINE_TAG

DEFINITIONS = """
import logging
from pathlib import Path

from dagster import (
    Definitions, InitLoggerContext, asset, define_asset_job, in_process_executor, logger,
    multiprocess_executor,
)
from sqlalchemy.exc import OperationalError

from pipeline.recipe import recipe_from_mapping
from pipeline.reporting.reports import write_report
from resources.recipe_executor import recipe_executor
from resources.tables import TableIOManager

FOLDER = Path(__file__).parent
VALUES = {"datasets": [{"name": "photos", "path": FOLDER / "data"}], "cache_dir": FOLDER / "cache",
          "output_dir": FOLDER / "out", "model": {"base": "models/none"}}
RECIPES = [recipe_from_mapping("small", VALUES)]

@asset(key=["small", "raw_images"], required_resource_keys=RESOURCES)
def scan() -> None:
    write_report(FOLDER / "out", "raw_images", {"in": NUM_IMAGES, "kept": 3, "rejected": 0})

@asset(key=["small", "validated_dataset"], deps=[scan], required_resource_keys=RESOURCES)
def validate() -> None: ...

class Failing(logging.Handler):
    def emit(self, record):
        if FAILING_EVENT in record.getMessage():
            raise OperationalError("select 1", {}, Exception("the server is away"))

@logger
def failing(context: InitLoggerContext) -> logging.Logger:
    created = logging.Logger("failing")
    created.addHandler(Failing())
    return created

defs = Definitions(
    [scan, validate],
    jobs=[define_asset_job("small_cache", executor_def=recipe_executor(EXECUTOR, RECIPES))],
    resources={"tables": TableIOManager(recipes=RECIPES)},
    loggers={"failing": failing},
)
"""

EXECUTORS = ("in_process_executor", "multiprocess_executor")


def execute(
    folder: Path,
    executor: str,
    *arguments: str,
    num_images: object = 3,
    failing_event: str = "",
    resources: tuple[str, ...] = ("tables",),
) -> subprocess.CompletedProcess[str]:
    """Execute the job with `num_images` in its first report, and steps that use the `resources`.

    The logger `failing`, if it is in use, raises at the event with `failing_event` in its text.
    """
    (folder / "data").mkdir()
    (folder / "home").mkdir()
    text = DEFINITIONS.replace("EXECUTOR", executor).replace("NUM_IMAGES", repr(num_images))
    text = text.replace("RESOURCES", repr(set(resources)))
    return execute_text(folder, text.replace("FAILING_EVENT", repr(failing_event)), "small_cache", *arguments)


def execute_text(folder: Path, text: str, job: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Execute a job in definitions with this text."""
    file = folder / "definitions.py"
    file.write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "dagster", "job", "execute", "-f", str(file), "-j", job, *arguments],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "DAGSTER_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        check=False,
    )


def with_logger(folder: Path, name: str) -> tuple[str, str]:
    """Return the arguments for a run that uses a logger."""
    config = folder / "run.yaml"
    config.write_text(f"loggers: {{{name}: {{}}}}\n", encoding="utf-8")
    return "-c", str(config)


def only_run(folder: Path) -> DagsterRun:
    with DagsterInstance.from_config(str(folder / "home")) as instance:
        (run,) = instance.get_runs()
    return run


def status(folder: Path) -> DagsterRunStatus:
    """Return the status of the only run."""
    return only_run(folder).status


@pytest.mark.parametrize("executor", EXECUTORS)
def test_O08_a_good_run_is_summarized_once_and_names_its_machine(tmp_path: Path, executor: str) -> None:
    """No step creates a resource, like a step that waits for a pool."""
    completed = execute(tmp_path, executor, resources=())
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert completed.stdout.startswith("\nsmall_cache: done after ")
    assert completed.stdout.endswith("\n  images  3 found, 0 rejected, 3 kept\n")
    assert only_run(tmp_path).tags[MACHINE_TAG] == platform.node()


@pytest.mark.parametrize("executor", [EXECUTORS[0], pytest.param(EXECUTORS[1], marks=pytest.mark.slow)])
def test_a_summary_that_fails_leaves_a_good_run_good(tmp_path: Path, executor: str) -> None:
    completed = execute(tmp_path, executor, num_images="many")
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert completed.stdout == ""
    [warning] = [line for line in completed.stderr.splitlines() if line.startswith("warning: the run ")]
    assert "cannot be summarized: ValueError: " in warning
    assert status(tmp_path) == DagsterRunStatus.SUCCESS


@pytest.mark.parametrize(
    ("executor", "failing_event"),
    [
        ("in_process_executor", "RESOURCE_INIT_SUCCESS"),
        pytest.param(
            "multiprocess_executor",
            "Executing steps using multiprocess executor",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_error_outside_of_the_steps_is_not_printed_as_a_stop(
    tmp_path: Path, executor: str, failing_event: str
) -> None:
    completed = execute(tmp_path, executor, *with_logger(tmp_path, "failing"), failing_event=failing_event)
    assert completed.returncode == 1
    # Dagster may fail again with the same logger, and print that below the summary.
    what = "Dagster's database cannot be used: (builtins.Exception) the server is away"
    assert completed.stderr.count(f"\n{what}") == 1
    assert "Stopped: " not in completed.stderr
    assert status(tmp_path) == DagsterRunStatus.FAILURE


WAITING = """
import logging, os, signal, threading

from dagster import Definitions, InitLoggerContext, asset, define_asset_job, in_process_executor, logger

from resources.recipe_executor import recipe_executor

def interrupt():
    os.kill(os.getpid(), signal.SIGTERM)

class Interrupting(logging.Handler):
    def emit(self, record):
        if "blocked by limit for pool" in record.getMessage():
            interrupt()

@logger
def interrupting(context: InitLoggerContext) -> logging.Logger:
    created = logging.Logger("interrupting")
    if MOMENT == "as it begins":
        created.addHandler(Interrupting())
    return created

@asset(pool="gpu")
def a_first() -> None: ...

@asset
def b_second() -> None:
    if MOMENT == "after another step":
        threading.Timer(2.0, interrupt).start()

defs = Definitions(
    [a_first, b_second],
    jobs=[define_asset_job("waiting", executor_def=recipe_executor(in_process_executor, []))],
    loggers={"interrupting": interrupting},
)
"""


@pytest.mark.parametrize("moment", ["as it begins", "after another step"])
def test_a_signal_ends_a_wait_for_a_pool(tmp_path: Path, moment: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with DagsterInstance.from_config(str(home)) as instance:
        storage = instance.event_log_storage
        storage.set_concurrency_slots("gpu", 1)
        storage.claim_concurrency_slot("gpu", "another", "its_step")
        completed = execute_text(
            tmp_path,
            WAITING.replace("MOMENT", repr(moment)),
            "waiting",
            *with_logger(tmp_path, "interrupting"),
        )
        assert "Stopped: the run was stopped" in completed.stderr, completed.stderr[-3000:]
        assert status(tmp_path) == DagsterRunStatus.FAILURE
        assert [step.run_id for step in storage.get_concurrency_info("gpu").pending_steps] == ["another"]
