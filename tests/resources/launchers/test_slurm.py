"""Encoding and training as jobs of a real Slurm with two nodes on this machine."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from dagster import AssetExecutionContext, DagsterInstance, asset, materialize

from pipeline.errors import LatentlineError, LaunchError, ModelError
from pipeline.recipe import AccelerateSettings
from pipeline.vae_latents.stage import cache_latents
from resources.launchers.local import AccelerateLauncher
from resources.launchers.slurm import SlurmLauncher
from tests.pipeline.cache_case import Cache, cache, entry_bytes
from tests.slurm_cluster import SlurmCluster, slurm_cluster, why_no_slurm

__all__ = ["cache", "entry_bytes"]  # fixtures

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm())),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running_cluster:
        yield running_cluster


@pytest.fixture(autouse=True)
def deployment(cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use the cluster's commands and a scratch folder of this test, which is returned."""
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "deployment.yaml"
    file.write_text(f"scratch: {tmp_path / 'scratch'}\n", encoding="utf-8")
    monkeypatch.setenv("LATENTLINE_DEPLOYMENT", str(file))
    return tmp_path / "scratch"


def in_step(launcher: SlurmLauncher, work: Callable[[Any], object]) -> tuple[list[str], Exception | None]:
    """Call `work` with a launch in a step; return the messages in Dagster's log, and the error."""
    errors: list[Exception] = []

    # Annotated as in the project's assets.
    @asset
    def step(context: AssetExecutionContext, launcher: AccelerateLauncher) -> None:
        try:
            work(launcher.bind(context, AccelerateSettings()))
        except Exception as err:
            errors.append(err)

    with DagsterInstance.ephemeral() as instance:
        result = materialize([step], resources={"launcher": launcher}, instance=instance)
        messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
    return messages, errors[0] if errors else None


def encode(project: Cache, launch: Any) -> Any:
    return cache_latents(project.recipe, project.buckets(), project.tables, launch=launch, log=str)


def encoding_processes() -> list[psutil.Process]:
    """Return the encoding processes that this cluster runs."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_own = process.environ().get("SLURM_CONF") == os.environ["SLURM_CONF"]
            if is_own and "pipeline.vae_latents.worker" in process.cmdline():
                found.append(process)
    return found


def test_an_encoding_is_a_job_array_whose_entries_have_the_bytes_of_a_local_run(
    cache: Any, entry_bytes: Any, in_process_launch: Any, deployment: Path
) -> None:
    encode(cache, in_process_launch)
    expected = entry_bytes()
    shutil.rmtree(cache.recipe.cache_dir)
    shutil.rmtree(cache.recipe.output_dir)

    launcher = SlurmLauncher(workers=3, options=["--cpus-per-task=1", "--time=10"])
    reports: list[Any] = []
    messages, error = in_step(launcher, lambda launch: reports.append(encode(cache, launch).report))
    assert error is None
    assert entry_bytes() == expected
    assert reports[0]["encoded"] == 5
    assert any("5 entries for 3 workers" in message for message in messages)
    assert list((deployment / "slurm").iterdir()) == [], "output files are removed after success"
    assert list((cache.recipe.cache_dir / "orders").iterdir()) == []


def test_an_option_that_slurm_does_not_know_is_reported_with_its_message(cache: Any) -> None:
    _, error = in_step(SlurmLauncher(options=["--no-such-option"]), lambda launch: encode(cache, launch))
    assert isinstance(error, LaunchError)
    assert "rejected" in error.what
    assert "--no-such-option" in error.where
    assert "launcher.options" in error.fix


def test_the_error_of_a_task_is_raised_in_the_step(cache: Any, tmp_path: Path, tiny_sd: Path) -> None:
    moved = shutil.copytree(tiny_sd, tmp_path / "model")
    project = cache.with_settings(model={"base": str(moved)})

    def encode_without_model(launch: Any) -> None:
        def remove_model_first(module: str, order: Path, meanwhile: Any) -> None:
            meanwhile()
            shutil.rmtree(moved)
            launch(module, order)

        encode(project, remove_model_first)

    _, error = in_step(SlurmLauncher(workers=2), encode_without_model)
    assert isinstance(error, ModelError)
    assert "not on this worker" in error.what
    assert "encoding shard" in error.where


def test_a_killed_task_is_named_and_a_repetition_encodes_the_rest(cache: Any, entry_bytes: Any) -> None:
    def kill_one(launch: Any) -> None:
        child = os.fork()
        if child == 0:
            while not (workers := encoding_processes()):
                time.sleep(0.05)
            # The parent of the encoding process is `latentline encode`.
            os.kill(workers[0].ppid(), signal.SIGKILL)
            os._exit(0)
        try:
            encode(cache, launch)
        finally:
            os.waitpid(child, 0)

    _, error = in_step(SlurmLauncher(workers=2), kill_one)
    assert isinstance(error, LaunchError)
    assert "1 shard is incomplete, although the encoding workers have ended" in error.what
    survived = entry_bytes()
    reports: list[LatentlineError] = []
    _, error = in_step(SlurmLauncher(workers=2), lambda launch: reports.append(encode(cache, launch).report))
    assert error is None
    assert reports[0]["encoded"] == 5 - len(survived)


def test_an_interrupted_step_cancels_its_job_and_no_process_is_left(cache: Any) -> None:
    def interrupt(launch: Any) -> None:
        child = os.fork()
        if child == 0:
            while not encoding_processes():
                time.sleep(0.05)
            os.kill(os.getppid(), signal.SIGINT)
            os._exit(0)
        try:
            encode(cache, launch)
        except BaseException as err:
            raise RuntimeError(type(err).__name__) from err
        finally:
            os.waitpid(child, 0)

    messages, error = in_step(SlurmLauncher(workers=2), interrupt)
    assert isinstance(error, RuntimeError)
    assert any("cancelling the Slurm job" in message for message in messages)
    assert encoding_processes() == []
    # Slurm lists a cancelled job as completing until its nodes have confirmed the end.
    deadline_s = time.monotonic() + 60
    while listed := subprocess.run(["squeue", "--noheader"], capture_output=True, check=True).stdout:
        assert time.monotonic() < deadline_s, listed
        time.sleep(0.2)
