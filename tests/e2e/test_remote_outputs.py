"""Jobs with their output folder in a bucket: steps on machines that have nothing in common but the bucket."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest
from dagster import AssetKey, AssetSelection

from assets.metadata import content_version
from pipeline.outputs.lease import Lease
from pipeline.recipe import Recipe
from pipeline.recipe.check_specs import SPECS
from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.storage.tables import Tables
from tests.command_line import latentline
from tests.e2e.finished_runs import lora_weights

CACHE_ASSETS = [asset for asset in SPECS if asset != "trained_lora"]


@pytest.fixture
def bucket(s3: str) -> str:
    name = f"bucket-{uuid.uuid4().hex[:8]}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
    return name


@pytest.fixture
def remote(cached: Any, bucket: str) -> Iterator[Recipe]:
    """The recipe of `cached` with its outputs in a bucket; its cache holds all entries."""
    recipe = cached.recipe(output_dir=f"s3://{bucket}/out")
    yield recipe
    shutil.rmtree(recipe.output_dir, ignore_errors=True)


def names_in(bucket: str) -> list[str]:
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    return sorted(name.removeprefix(f"{bucket}/out/") for name in files.find(f"{bucket}/out"))


def select(workspace: Any, asset: str) -> Any:
    return workspace.select(AssetSelection.assets(AssetKey(["small", asset])))


def on_a_new_machine(workspace: Any, recipe: Recipe, asset: str) -> Any:
    """Materialize one asset with an empty scratch folder."""
    shutil.rmtree(recipe.output_dir, ignore_errors=True)
    return select(workspace, asset)


def test_each_step_finds_its_inputs_with_an_empty_scratch_folder(
    cached: Any, remote: Recipe, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asset in CACHE_ASSETS:
        assert on_a_new_machine(cached, remote, asset).success, asset
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.get(f"{bucket}/out/tables", str(tmp_path / "pulled/tables"), recursive=True)
    pulled, local = Tables(tmp_path / "pulled"), Tables(cached.out)
    for asset in CACHE_ASSETS:
        assert content_version(pulled.read(asset)) == content_version(local.read(asset)), asset
    assert content_version(pulled.read("rejected")) == content_version(local.read("rejected"))
    names = names_in(bucket)
    assert {"reports/dataset/index.html", "reports/vae_latents_checks.json"} <= set(names)
    assert not [name for name in names if "/." in name or name.endswith((".lock", ".tmp"))]

    # The commands find the same outputs, on another machine.
    shutil.rmtree(remote.output_dir)
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(cached.file.parent))
    planned = latentline("plan", "small", "--no-memory")
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.count(" 0 to encode") == 2, planned.stdout
    shutil.rmtree(remote.output_dir)
    collected = latentline("gc").stdout
    assert "11 used in the last 30 days" in collected, collected


@pytest.mark.slow
def test_a_finished_run_is_not_repeated_on_another_machine(cached: Any, remote: Recipe, bucket: str) -> None:
    for asset in CACHE_ASSETS:
        assert select(cached, asset).success, asset
    assert on_a_new_machine(cached, remote, "trained_lora").success
    names = names_in(bucket)
    assert "lora/pytorch_lora_weights.safetensors" in names
    assert len([name for name in names if name.endswith("COMPLETE")]) == 2
    assert not [name for name in names if "step-00000000" in name or name.endswith(("lease", "lock"))]

    assert on_a_new_machine(cached, remote, "trained_lora").success
    report = Tables(remote.output_dir).folder.parent / "reports" / "trained_lora.json"
    assert '"launched": false' in report.read_text("utf-8")
    shutil.rmtree(remote.output_dir)
    exported = cached.latentline("export", "small", "--step", "2")
    assert exported.returncode == 0, exported.stderr
    assert "lora/ holds step 2" in exported.stdout
    assert "runs/exported_step.json" in names_in(bucket)
    described = cached.latentline("provenance", f"s3://{bucket}/out")
    assert described.returncode == 0, described.stderr
    assert "exported step        2" in described.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_killed_training_resumes_bit_for_bit_on_another_machine(
    cached: Any, remote: Recipe, bucket: str
) -> None:
    training = {"batch_size": 2, "checkpoint_every": 2, "sample_every": 0, "lora": {"rank": 2, "alpha": 2.0}}
    recipe = cached.recipe(output_dir=f"s3://{bucket}/out", training={**training, "steps": 20})
    for asset in CACHE_ASSETS:
        assert select(cached, asset).success, asset
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.copy(f"{bucket}/out", f"{bucket}/before", recursive=True)
    assert on_a_new_machine(cached, recipe, "trained_lora").success
    uninterrupted = lora_weights(recipe.output_dir)

    files.rm(f"{bucket}/out", recursive=True)
    files.copy(f"{bucket}/before", f"{bucket}/out", recursive=True)
    shutil.rmtree(recipe.output_dir)
    process = subprocess.Popen(
        cached.command("asset", "materialize", "-m", "assets.definitions", "--select", "small/trained_lora"),
        env=cached.environment(),
        cwd=cached.root,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + 600
    while not any(name.endswith("COMPLETE") for name in names_in(bucket)):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert [name for name in names_in(bucket) if name.endswith("finished.json")] == []

    assert on_a_new_machine(cached, recipe, "trained_lora").success
    report = (recipe.output_dir / "reports" / "trained_lora.json").read_text("utf-8")
    assert '"resumed_from": 0,' not in report
    assert lora_weights(recipe.output_dir) == uninterrupted


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_suspended_machine_that_lost_its_run_stops_and_changes_nothing_at_the_address(
    cached: Any, remote: Recipe, bucket: str
) -> None:
    """All processes of a training are stopped for longer than a lease lasts, and then continue."""
    training = {"batch_size": 2, "checkpoint_every": 2, "sample_every": 0, "lora": {"rank": 2, "alpha": 2.0}}
    cached.recipe(output_dir=f"s3://{bucket}/out", training={**training, "steps": 20_000})
    for asset in CACHE_ASSETS:
        assert select(cached, asset).success, asset
    command = ("asset", "materialize", "-m", "assets.definitions", "--select", "small/trained_lora")
    output = cached.root / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            cached.command(*command),
            env=cached.environment(),
            cwd=cached.root,
            start_new_session=True,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: any(name.endswith("COMPLETE") for name in names_in(bucket)), process)
        suspend(process, signal.SIGSTOP)
        (lease_name,) = (name for name in names_in(bucket) if name.endswith("/lease"))
        log: list[str] = []
        other = Lease(RemoteFolder(Url(f"s3://{bucket}/out")), lease_name, owner="another", log=log.append)
        other.acquire()
        assert "is training this run; waiting" in log[0]

        at_takeover = contents_of(bucket)
        suspend(process, signal.SIGCONT)
        resumed_s = time.monotonic()
        assert process.wait(600) == 1
        assert time.monotonic() - resumed_s < 300, "long before its 20,000 steps end"
    finally:
        suspend(process, signal.SIGKILL)

    assert contents_of(bucket) == at_takeover
    assert other.is_held()
    text = output.read_text("utf-8")
    assert "another machine took over the run" in text, text[-5000:]
    assert f"s3://{bucket}/out/{lease_name.removesuffix('/lease')}" in text
    assert "start the job again; it waits until that machine has finished" in text
    assert "nothing more is uploaded" in text


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 900
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def suspend(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and all processes that it has started."""
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid)
        for each in (started, *started.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)


def contents_of(bucket: str) -> dict[str, bytes]:
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    return {name: files.cat_file(f"{bucket}/out/{name}") for name in names_in(bucket)}
