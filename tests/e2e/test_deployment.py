"""Commands with a deployment file: a broken one, other executors, and Dagster's command line `dg`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from assets.metadata import content_version
from pipeline.recipe import project_root
from tests.e2e.daemon import make_home
from tests.e2e.finished_runs import processes_of, wait_for_the_end, weights
from tests.e2e.problems import last_problem

SECRET = "hunter2hunter2"
BROKEN = f"executor: multiprocesss\npassword: {SECRET}\n"
DG = Path(sys.executable).with_name("dg")


def deployment(workspace: Any, text: str) -> dict[str, str]:
    """Write a deployment file, and return the environment of commands with it and with an instance."""
    file = workspace.root / "site.yaml"
    file.write_text(text, encoding="utf-8")
    home = workspace.root / "home"
    if not home.exists():
        make_home(home)
    return {"LATENTLINE_DEPLOYMENT": str(file), "DAGSTER_HOME": str(home)}


def dg(workspace: Any, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `dg` in the project, where it finds its configuration."""
    return subprocess.run(
        [str(DG), *arguments],
        env={**workspace.environment(), **variables},
        cwd=project_root(),
        capture_output=True,
        text=True,
        check=False,
    )


def table_contents(workspace: Any) -> dict[str, str]:
    """Return the content version of each table; times of files and of the run are not part of it."""
    files = sorted((workspace.out / "tables").glob("*.parquet"))
    return {file.stem: content_version(pl.read_parquet(file)) for file in files}


@pytest.mark.slow
def test_a_broken_deployment_ends_each_kind_of_command_with_its_error(fresh: Any) -> None:
    variables = deployment(fresh, BROKEN)
    latentline = [sys.executable, "-c", "from pipeline.cli.main import main; main()"]
    for command in (
        fresh.command("job", "execute", "-m", "assets.definitions", "-j", "small_cache"),
        [*latentline, "gc"],
        [sys.executable, "-m", "assets.run", str(fresh.file), "small_cache"],
    ):
        completed = fresh.run(command, **variables)
        assert (completed.returncode, completed.stdout) == (1, ""), completed
        assert ("Traceback" in completed.stderr) == ("dagster" in command), "Dagster shows where it loaded it"
        assert SECRET not in completed.stderr
        message = completed.stderr[completed.stderr.index("DeploymentError: 2 mistakes in") :]
        assert "did you mean" in message or "use in_process, multiprocess or k8s" in message
        assert f"where: {fresh.root / 'site.yaml'}:2, password" in message


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_dg_and_steps_in_other_processes_end_with_one_summary(fresh: Any) -> None:
    variables = deployment(fresh, "executor: multiprocess\n")
    completed = dg(fresh, "launch", "--assets", "small/raw_images", **variables)
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert (completed.stdout + completed.stderr).count("small: done after") == 1
    assert completed.stdout.startswith("\nsmall: done after")
    assert "5 found" in completed.stdout
    assert (fresh.out / "tables" / "raw_images.parquet").is_file()


@pytest.mark.slow
def test_dg_checks_the_definitions(fresh: Any) -> None:
    completed = dg(fresh, "check", "defs")
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert "All definitions loaded successfully." in completed.stdout + completed.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_steps_in_other_processes_have_the_results_of_steps_in_one(cached: Any) -> None:
    variables = deployment(cached, "executor: multiprocess\n")
    expected = table_contents(cached)
    job = cached.command("job", "execute", "-m", "assets.definitions", "-j", "small_train")
    completed = cached.run(job, **variables)
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert (completed.stdout + completed.stderr).count("small_train: done after") == 1
    assert completed.stdout.startswith("\nsmall_train: done after")
    assert "0 encoded, 5 reused" in completed.stdout
    assert {name: table_contents(cached).get(name) for name in expected} == expected
    trained = weights(cached)

    # The same training by `dg launch` in one process is finished, so that its files stay.
    launched = dg(cached, "launch", "--job", "small_train", DAGSTER_HOME=variables["DAGSTER_HOME"])
    assert launched.returncode == 0, launched.stderr[-3000:]
    assert launched.stdout.startswith("\nsmall_train: done after")
    assert weights(cached) == trained


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_latentline_run_shows_the_steps_of_other_processes(cached: Any) -> None:
    variables = deployment(cached, "executor: multiprocess\n")
    completed = cached.run([sys.executable, "-m", "assets.run", str(cached.file), "small_cache"], **variables)
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert completed.stdout.count("small_cache: done after") == 1
    assert "  raw_images         5 image files" in completed.stderr
    for asset in ("raw_images", "validated_dataset", "aspect_buckets", "vae_latents", "text_embeddings"):
        finished = [line for line in completed.stderr.splitlines() if line.split()[::2] == [asset, "s"]]
        assert len(finished) == 1, completed.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_run_stops_a_training_in_another_process_which_resumes(
    cached: Any, number: signal.Signals
) -> None:
    variables = deployment(cached, "executor: multiprocess\n")
    training = {"steps": 2000, "batch_size": 2, "checkpoint_every": 1000, "lora": {"rank": 2}}
    cached.recipe(training=training)
    job = cached.command("job", "execute", "-m", "assets.definitions", "-j", "small_train")
    log = cached.root / "log"
    with log.open("w") as file:
        run = subprocess.Popen(
            job, env={**cached.environment(), **variables}, cwd=cached.root, stdout=file, stderr=file
        )
    while "training 4" not in log.read_text("utf-8"):
        assert run.poll() is None, log.read_text("utf-8")[-3000:]
        time.sleep(0.5)
    run.send_signal(number)
    assert run.wait(120) == 1
    wait_for_the_end(cached, 30)
    assert processes_of(cached) == []

    text = log.read_text("utf-8")
    problem = last_problem(text)
    assert problem.what.startswith("Stopped: the run was stopped"), text[-3000:]
    assert text.count("Stopped: the run was stopped") == 1
    assert "checkpoint" in problem.where
    [newest] = sorted((cached.out / "runs").glob("*/checkpoints/*/COMPLETE"))[-1:]
    step = int(newest.parent.name.removeprefix("step-"))

    # With a constant learning rate, another number of steps continues the same run.
    cached.recipe(training={**training, "steps": step + 2})
    resumed = cached.run(job, **variables)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert len(list((cached.out / "runs").iterdir())) == 1
    assert (newest.parents[1] / f"step-{step + 2:08}" / "COMPLETE").is_file()
