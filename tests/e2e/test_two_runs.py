"""Concurrent runs with the project's Dagster settings: one GPU step, one run per recipe, and a killed run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from dagster import AssetExecutionContext, DagsterEventType, DagsterInstance, DagsterRun, DagsterRunStatus

from assets.definitions import build_definitions
from assets.deployment import gpu_pool
from assets.names import LAUNCHER_RESOURCE
from pipeline.processes.fork_server import SERVER_MODULE
from pipeline.processes.launch import Launch, Meanwhile
from pipeline.recipe import AccelerateSettings, load_recipe
from pipeline.recipe.deployment import read_deployment
from resources.local_launcher import Observer
from tests.e2e.daemon import make_home, running, runs_of, succeeded, until
from tests.e2e.finished_runs import processes_of
from tests.e2e.gpu_pool import holders, occupy, waiting
from tests.e2e.served import CodeServer
from tests.in_process_launcher import InProcessLauncher

ENDLESS = {"steps": 100_000, "batch_size": 2, "checkpoint_every": 100_000, "sample_every": 0}


STOPPED = {DagsterRunStatus.CANCELED, DagsterRunStatus.FAILURE}


def step_moments(instance: DagsterInstance, run: DagsterRun, step: str) -> dict[DagsterEventType, float]:
    """Return the times of the step's start and end events so far."""
    kinds = {DagsterEventType.STEP_START, DagsterEventType.STEP_SUCCESS, DagsterEventType.STEP_FAILURE}
    entries = instance.all_logs(run.run_id, of_type=kinds)
    return {
        entry.get_dagster_event().event_type: entry.timestamp for entry in entries if entry.step_key == step
    }


def test_a_run_without_missing_entries_does_not_wait_for_the_gpu(cached, tmp_path: Path) -> None:
    with DagsterInstance.from_config(str(make_home(tmp_path / "home"))) as instance:
        occupy(instance)
        assert cached.execute("cache", instance).success
        assert waiting(instance) == holders(instance) == {"another"}


@pytest.mark.parametrize("pools", ["instance", "machine"])
def test_encoding_holds_the_pool_that_the_deployment_names(cached, tmp_path: Path, pools: str) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(f"pools: {pools}\n", encoding="utf-8")
    deployment = read_deployment(site)
    for kind in ("latents", "text"):
        shutil.rmtree(cached.cache / kind)
    job = build_definitions([load_recipe(cached.file)], deployment=deployment)
    launches: list[tuple[str, set[str]]] = []
    pool = gpu_pool(deployment)

    class Recording(InProcessLauncher):
        def bind(
            self,
            context: AssetExecutionContext,
            settings: AccelerateSettings,
            observer: Observer | None = None,
        ) -> Launch:
            inner = super().bind(context, settings, observer)

            def launch(module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
                launches.append((module, holders(context.instance, pool)))
                inner(module, job_file, meanwhile)

            return launch

    with DagsterInstance.from_config(str(make_home(tmp_path / "home"))) as instance:
        result = job.resolve_job_def("small_cache").execute_in_process(
            instance=instance, resources={LAUNCHER_RESOURCE: Recording()}
        )
        assert sorted(launches) == [
            ("pipeline.text_embeddings.worker", {result.run_id}),
            ("pipeline.vae_latents.worker", {result.run_id}),
        ]
        assert holders(instance, pool) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "way", "job"),
    [
        ("in_process", "Terminate", "small_cache"),
        ("in_process", "Terminate", "small_train"),
        ("in_process", "death of the code server", "small_cache"),
        ("multiprocess", "death of the code server", "small_cache"),
    ],
)
def test_a_run_that_waits_for_the_gpu_is_stopped(
    cached, tmp_path: Path, executor: str, way: str, job: str
) -> None:
    """Dagster's executor waits before a training, and the step itself before it encodes missing entries."""
    if job == "small_cache":
        shutil.rmtree(cached.cache / "text")
    deployment = tmp_path / "site.yaml"
    deployment.write_text(f"executor: {executor}\n", encoding="utf-8")
    environment = {**cached.environment(), "LATENTLINE_DEPLOYMENT": str(deployment)}
    with CodeServer(tmp_path / "home", environment) as server:
        log = tmp_path / "home" / "server.log"
        occupy(server.instance)
        run_id = server.launch(job)
        until(lambda: run_id in waiting(server.instance), "a waiting step", seconds=180, log=log)
        if way == "Terminate":
            server.terminate(run_id)
        else:
            server.kill()
        (run,) = runs_of(server.instance)
        until(lambda: status(server.instance, run) in STOPPED, "the end of the run", seconds=30, log=log)
        expected = DagsterRunStatus.CANCELED if way == "Terminate" else DagsterRunStatus.FAILURE
        assert status(server.instance, run) == expected
        assert holders(server.instance) == {"another"}
        assert waiting(server.instance) == {"another"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_O08_a_killed_run_frees_the_gpu_and_its_place_in_the_queue(cached, tmp_path: Path) -> None:
    """While one run trains, another recipe waits for the GPU and a job of the same recipe for its turn."""
    cached.recipe(training={**ENDLESS, "lora": {"rank": 2, "alpha": 2.0}})
    other = cached.copy_to(tmp_path / "other")
    text = other.file.read_text("utf-8")
    (cached.file.parent / "other.yaml").write_text(text, encoding="utf-8")
    home, log = make_home(tmp_path / "home"), tmp_path / "daemon.log"
    environment = {**cached.environment(), "DAGSTER_HOME": str(home)}

    def dagster(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "dagster", *arguments, "-m", "assets.definitions"]

    daemon = [sys.executable, "-m", "dagster._daemon", "run", "-m", "assets.definitions"]
    with (
        DagsterInstance.from_config(str(home)) as instance,
        running(daemon, environment=environment, cwd=tmp_path, log=log),
    ):
        first = subprocess.Popen(
            dagster("job", "execute", "-j", "small_train"),
            env=environment,
            cwd=tmp_path,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(lambda: _trains(instance), "the first training", seconds=120, log=log)
            (endless,) = runs_of(instance)
            for job in ("other_train", "small_cache"):
                command = dagster("job", "launch", "-j", job)
                subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True)
            _, training, cache = runs_of(instance)
            until(
                lambda: training.run_id in waiting(instance),
                "the second training to wait for the GPU",
                seconds=120,
                log=log,
            )
            assert holders(instance) == {endless.run_id}
            assert status(instance, cache) == DagsterRunStatus.QUEUED
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait()
        expected = [(endless, DagsterRunStatus.FAILURE)]
        expected += [(run, DagsterRunStatus.SUCCESS) for run in (training, cache)]
        for run, final in expected:
            until(
                lambda run=run, final=final: status(instance, run) == final,
                f"{run.job_name}: {final}",
                seconds=180,
                log=log,
            )
        (failure,) = instance.all_logs(endless.run_id, of_type=DagsterEventType.RUN_FAILURE)
        assert "ended without reporting it" in (failure.get_dagster_event().message or "")
        assert holders(instance) == set()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_O08_a_run_outlives_a_killed_daemon_and_the_next_one_starts_the_queue(cached, tmp_path: Path) -> None:
    cached.recipe(training={**ENDLESS, "steps": 400, "lora": {"rank": 2, "alpha": 2.0}})
    home, log = make_home(tmp_path / "home"), tmp_path / "daemon.log"
    environment = {**cached.environment(), "DAGSTER_HOME": str(home)}
    daemon = [sys.executable, "-m", "dagster._daemon", "run", "-m", "assets.definitions"]
    launch = [sys.executable, "-m", "dagster", "job", "launch", "-m", "assets.definitions", "-j"]
    with DagsterInstance.from_config(str(home)) as instance:
        with running(daemon, environment=environment, cwd=tmp_path, log=log) as pid:
            for job in ("small_train", "small_cache"):
                subprocess.run([*launch, job], env=environment, cwd=tmp_path, check=True, capture_output=True)
            until(lambda: _trains(instance), "the training", seconds=120, log=log)
            os.kill(pid, signal.SIGKILL)
        training, cache = runs_of(instance)
        assert status(instance, training) == DagsterRunStatus.STARTED
        assert status(instance, cache) == DagsterRunStatus.QUEUED

        log = tmp_path / "next_daemon.log"
        with running(daemon, environment=environment, cwd=tmp_path, log=log):
            until(lambda: succeeded(instance, 2), "both runs", seconds=300, log=log)
        assert holders(instance) == set()
    assert sum(1 for _ in (cached.out / "lora").glob("*.safetensors")) == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_is_started_again_and_resumes_from_its_checkpoint(cached, tmp_path: Path) -> None:
    """The process of the run is killed, which no handler of it can notice."""
    training = {**ENDLESS, "steps": 400, "checkpoint_every": 10}
    cached.recipe(training={**training, "lora": {"rank": 2, "alpha": 2.0}})
    home, log = make_home(tmp_path / "home"), tmp_path / "daemon.log"
    environment = {**cached.environment(), "DAGSTER_HOME": str(home)}
    daemon = [sys.executable, "-m", "dagster._daemon", "run", "-m", "assets.definitions"]
    launch = [sys.executable, "-m", "dagster", "job", "launch", "-m", "assets.definitions", "-j"]
    with (
        DagsterInstance.from_config(str(home)) as instance,
        running(daemon, environment=environment, cwd=tmp_path, log=log),
    ):
        subprocess.run(
            [*launch, "small_train"], env=environment, cwd=tmp_path, check=True, capture_output=True
        )
        runs = cached.out / "runs"
        until(lambda: len(list(runs.glob("*/checkpoints/*"))) > 1, "checkpoints", seconds=180, log=log)
        forked = [process for process in processes_of(cached) if SERVER_MODULE in process.cmdline()]
        server = min(forked, key=psutil.Process.create_time)
        parent = server.parent()
        assert parent is not None
        parent.kill()
        until(lambda: len(runs_of(instance)) == 2, "another run", seconds=120, log=log)
        killed, again = runs_of(instance)
        assert status(instance, killed) == DagsterRunStatus.FAILURE
        assert again.parent_run_id == killed.run_id
        final = DagsterRunStatus.SUCCESS
        until(lambda: status(instance, again) == final, "the resumed run", seconds=240, log=log)
        assert holders(instance) == set()
    report = json.loads((cached.out / "reports" / "trained_lora.json").read_text("utf-8"))
    assert report["resumed_from"] >= 10
    assert len(list(runs.iterdir())) == 1


def _trains(instance: DagsterInstance) -> bool:
    return any(
        DagsterEventType.STEP_START in step_moments(instance, run, "small__trained_lora")
        for run in runs_of(instance)
    )


def status(instance: DagsterInstance, run: DagsterRun) -> DagsterRunStatus | None:
    record = instance.get_run_by_id(run.run_id)
    return record.status if record else None
