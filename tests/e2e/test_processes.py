"""Complete `dagster job execute` commands: training, interrupted training, and two cache jobs at once."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from dagster import AssetKey, AssetSelection

TRAINING = {
    "batch_size": 2,
    "sample_every": 0,
    "lora": {"rank": 2, "alpha": 2.0},
}


def until(condition: Callable[[], bool], job: subprocess.Popen[str], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        assert job.poll() is None, f"the job ended: {job.communicate()[1][-3000:]}"
        time.sleep(0.05)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [
        process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def contents(workspace) -> dict[str, bytes]:
    paths = workspace.entries("latents") + workspace.entries("text")
    return {str(path.relative_to(workspace.cache)): path.read_bytes() for path in paths}


@pytest.mark.slow
def test_R12_an_interrupted_job_leaves_a_checkpoint_and_no_process(cached) -> None:
    cached.recipe(training={**TRAINING, "steps": 100_000, "checkpoint_every": 100_000})
    job = cached.start("train")
    until(lambda: any(cached.out.glob("runs/*/logs/*")) and _steps_done(cached), job)
    processes = psutil.Process(job.pid).children(recursive=True)
    assert len(processes) >= 2
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=60)
    assert job.returncode != 0
    assert alive(processes) == [], errors[-2000:]
    assert list(cached.out.glob("runs/*/checkpoints/step-*/COMPLETE")) != []
    assert not (cached.out / "lora").exists()


def _steps_done(workspace) -> bool:
    logs = [file for file in workspace.out.glob("runs/*/logs/*") if file.is_file()]
    return any(file.stat().st_size > 0 for file in logs)


@pytest.mark.slow
def test_L10_two_cache_jobs_at_once_write_the_entries_of_a_single_one(cached_once, fresh) -> None:
    jobs = [fresh.start("cache"), fresh.start("cache")]
    errors = [job.communicate(timeout=240)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], errors
    assert contents(fresh) == contents(cached_once)


@pytest.mark.slow
def test_a_finished_lora_is_not_trained_again_after_the_sources_are_deleted(cached) -> None:
    job = cached.start("train")
    output, errors = job.communicate(timeout=240)
    assert job.returncode == 0, errors[-3000:]
    assert re.search(r"loss [0-9.]+ \(first\) to [0-9.]+ \(last\)", output + errors), (
        "the summary has the loss"
    )
    assert {path.name for path in (cached.out / "lora").glob("*.safetensors")} == {
        "pytorch_lora_weights.safetensors",
        "small_comfyui.safetensors",
        "small_kohya.safetensors",
    }
    before = weights(cached)
    assert len(before) >= 3
    shutil.rmtree(cached.data)
    assert cached.select(AssetSelection.assets(AssetKey(["small", "trained_lora"]))).success
    assert weights(cached) == before


def test_training_needs_only_the_cache(cached) -> None:
    shutil.rmtree(cached.data)
    assert cached.select(AssetSelection.assets(AssetKey(["small", "trained_lora"]))).success
    assert (cached.out / "lora" / "pytorch_lora_weights.safetensors").is_file()
    assert cached.report("trained_lora")["steps"] == 4
    assert not cached.data.exists()


def weights(workspace) -> dict[Path, int]:
    """Return the weight files in runs/ with their modification times."""
    return {path: path.stat().st_mtime_ns for path in (workspace.out / "runs").rglob("*.safetensors")}
