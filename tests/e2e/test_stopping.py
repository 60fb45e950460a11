"""Runs stopped at random moments, in each way that a run can be stopped.

Every process of the run must end in time, `latentline verify` must find no damage, and the same job started
again must end with the weights of an uninterrupted run, bit for bit. The faster tests of the parts are in
tests/resources/test_local_launcher and test_run_worker.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.finished_runs import wait_for_the_end, weights
from tests.e2e.problems import last_problem
from tests.e2e.served import CodeServer

TRAINING = {
    "steps": 10,
    "batch_size": 2,
    "checkpoint_every": 3,
    "sample_every": 0,
    "lora": {"rank": 2, "alpha": 2.0},
}

WITHIN_S = 30.0
WITHIN_AFTER_KILL_S = 5.0

Stop = Callable[[Any, Path, float], float]
"""Starts the train job of a workspace, stops it after some seconds, and returns how long its processes may
still run; the second argument is a folder for Dagster."""


def by_signal(number: int) -> Stop:
    """Send a signal to `dagster job execute`, whose process executes the steps."""

    def stop(workspace: Any, home: Path, after_s: float) -> float:
        with (home / "log").open("w") as log:
            job = subprocess.Popen(
                workspace.command("job", "execute", "-m", "assets.definitions", "-j", "small_train"),
                env=workspace.environment(),
                cwd=workspace.root,
                stdout=log,
                stderr=log,
            )
        with suppress(subprocess.TimeoutExpired):
            job.wait(after_s)
        ended = job.poll() is not None
        job.send_signal(number)
        if ended:
            return WITHIN_S
        if number != signal.SIGKILL:
            stopped_s = time.monotonic()
            assert job.wait(WITHIN_S) != 0
            text = (home / "log").read_text("utf-8")
            finished = "\nsmall_train: done after " in text
            if "  raw_images  " in text and not finished:  # before that, Python itself may be interrupted
                assert last_problem(text).what.startswith("Stopped: "), text[-3000:]
            return WITHIN_S - (time.monotonic() - stopped_s)
        job.wait()
        return WITHIN_AFTER_KILL_S

    return stop


def by_dagster(workspace: Any, home: Path, after_s: float) -> float:
    """Terminate the run as the UI's button does."""
    with CodeServer(home / "dagster", workspace.environment()) as server:
        run = server.launch("small_train")
        time.sleep(after_s)
        server.terminate(run)
        wait_for_the_end(workspace, WITHIN_S, server=server.pid)
    return WITHIN_AFTER_KILL_S


def by_death_of_the_server(workspace: Any, home: Path, after_s: float) -> float:
    """Kill the code server that started the run."""
    with CodeServer(home / "dagster", workspace.environment()) as server:
        server.launch("small_train")
        time.sleep(after_s)
    return WITHIN_S


WAYS: dict[str, Stop] = {
    "SIGINT": by_signal(signal.SIGINT),
    "SIGTERM": by_signal(signal.SIGTERM),
    "SIGKILL": by_signal(signal.SIGKILL),
    "Dagster's stop": by_dagster,
    "death of the code server": by_death_of_the_server,
}


@pytest.fixture(scope="module")
def uninterrupted(
    cached_once: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, dict[str, bytes]], float]:
    """The weights and the duration of an uninterrupted job with an empty cache."""
    workspace = cached_once.copy_to(tmp_path_factory.mktemp("uninterrupted"))
    shutil.rmtree(workspace.cache)
    workspace.recipe(training=TRAINING)
    started_s = time.monotonic()
    run_to_its_end(workspace)
    return weights(workspace), time.monotonic() - started_s


def run_to_its_end(workspace: Any) -> None:
    completed = workspace.dagster("job", "execute", "-m", "assets.definitions", "-j", "small_train")
    assert completed.returncode == 0, completed.stderr[-3000:]


def stopped_and_resumed(
    workspace: Any, home: Path, stop: Stop, after_s: float
) -> dict[str, dict[str, bytes]]:
    home.mkdir()
    within_s = stop(workspace, home, after_s)
    wait_for_the_end(workspace, within_s)
    if (workspace.out / "tables" / "vae_latents.parquet").is_file():
        require_no_damage(workspace)
    run_to_its_end(workspace)
    if stop is not WAYS["SIGKILL"]:  # a killed writer leaves its temporary file to the jobs of the next day
        assert list(workspace.root.rglob("*.tmp")) == []
    return weights(workspace)


def require_no_damage(workspace: Any) -> None:
    """Fail if `latentline verify` finds a damaged entry.

    Entries may be missing: the tables of an earlier job name all of them, and this job has a new cache.
    """
    completed = workspace.latentline("verify", "small")
    problems = re.findall(r"^  \S.*", completed.stdout, re.MULTILINE)
    assert all(line.endswith(": the entry is missing") for line in problems), completed.stdout
    assert completed.returncode == (1 if problems else 0), completed.stdout + completed.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(10))
def test_R12_a_job_stopped_at_any_moment_resumes_to_equal_weights(
    cached: Any, uninterrupted: tuple[dict[str, dict[str, bytes]], float], way: str, seed: int
) -> None:
    rng = random.Random(f"{way} {seed}")
    expected, duration_s = uninterrupted
    if rng.random() < 0.5:
        shutil.rmtree(cached.cache)
    else:
        duration_s *= 0.5
    cached.recipe(training=TRAINING)
    resumed = stopped_and_resumed(cached, cached.root / "home", WAYS[way], rng.uniform(0.5, 0.9 * duration_s))
    assert resumed == expected
