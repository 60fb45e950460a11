"""The S3 gateway or PostgreSQL stops for 30 s in the middle of a job."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from dagster import DagsterRunStatus
from safetensors.numpy import load

from pipeline.storage.regular_files import file_sha256
from tests.e2e.postgres_server import PostgresServer
from tests.machines.ceph import Gateway
from tests.machines.children import until
from tests.machines.counting_proxy import Request
from tests.machines.outputs import downloaded, lora
from tests.machines.project import latentline

if TYPE_CHECKING:
    from tests.machines.pair import Pair

OUTAGE_S = 30


class StopAtWrite:
    """Stops a service when the first file with `part` in its name is on its way to the gateway."""

    def __init__(self, service: Gateway | PostgresServer, part: str) -> None:
        self.is_stopped = threading.Event()
        self._service, self._part = service, part
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> None:
        with self._lock:
            if not self.is_stopped.is_set() and request.method == "PUT" and self._part in request.name:
                self._service.stop()
                self.is_stopped.set()


def assert_no_file_is_torn(folder: Path) -> None:
    """Read every table, report and file of tensors, and compare complete checkpoints with their hashes."""
    for path in folder.rglob("*.parquet"):
        pl.read_parquet(path)
    for path in folder.rglob("*.json"):
        json.loads(path.read_text("utf-8"))
    for path in folder.rglob("*.safetensors"):
        assert load(path.read_bytes()), f"{path} is torn"
    for marker in folder.rglob("COMPLETE"):
        hashes = json.loads(marker.read_text("utf-8"))["sha256"]
        assert hashes == {name: file_sha256(marker.with_name(name)) for name in hashes}, marker


def assert_history(pair: Pair, status: int) -> None:
    """Check that the outage ended the first run in the history if its command failed, and not the second."""
    first = DagsterRunStatus.FAILURE if status else DagsterRunStatus.SUCCESS
    statuses = [run.status for run in pair.instance.get_runs()]
    assert statuses == [DagsterRunStatus.SUCCESS, first]


@dataclass
class Outage:
    """An outage of `OUTAGE_S` during a job of machine a, and the same job again.

    Attributes:
        status: Exit status of the first job.
        after_rerun: Copy of the outputs after the second job.
    """

    status: int
    after_rerun: Path

    def report(self, asset: str) -> dict[str, Any]:
        """Return the report of an asset in the second job."""
        return json.loads((self.after_rerun / "reports" / f"{asset}.json").read_text("utf-8"))


def outage(
    pair: Pair, service: Gateway | PostgresServer, part: str, command: Sequence[str], folder: Path
) -> Outage:
    """Stop the service at the first write of a file with `part` in its name, and check all files."""
    bucket = pair.a.cache.removesuffix("/cache")
    pair.a.write_recipe(output_dir=f"{bucket}/out")
    pair.proxy.before = stop = StopAtWrite(service, part)
    job = pair.a.start(command, log="run.log")
    until(stop.is_stopped.is_set, "the start of the outage", seconds=1200, child=job)
    time.sleep(OUTAGE_S)
    # Not in another thread: the kernel ends the gateway together with the thread that starts it.
    service.start()
    status = job.wait(900)
    assert_no_file_is_torn(downloaded(bucket, folder / "after_outage"))
    if status:
        assert "where:" in job.output(), job.output()[-3000:]
        assert "fix:" in job.output()
        assert "this is a bug" not in job.output()

    rerun = pair.a.machine.run(command, **pair.a.variables())
    assert rerun.returncode == 0, rerun.stderr[-3000:]
    assert_history(pair, status)
    assert_no_file_is_torn(downloaded(bucket, folder / "after_rerun"))
    return Outage(status, folder / "after_rerun" / "out")


@pytest.mark.parametrize(
    ("service", "part"),
    [
        ("database", "/tables/raw_images"),  # between two steps: the next write is Dagster's own event
        ("gateway", "/tables/raw_images"),
        ("gateway", "/latents/"),
        ("database", "/text/"),
    ],
)
def test_O13_a_cache_job_survives_an_outage_or_ends_with_a_fix_and_nothing_is_lost(
    pair: Pair, gateway: Gateway, database: PostgresServer, tmp_path: Path, *, service: str, part: str
) -> None:
    stopped = gateway if service == "gateway" else database
    command = latentline("run", "small", "--cache-only")
    after = outage(pair, stopped, part, command, tmp_path / "copies")
    latents, text = after.report("vae_latents"), after.report("text_embeddings")
    assert (latents["samples"], latents["failed"], text["samples"], text["failed"]) == (5, 0, 5, 0)
    assert latents["encoded"] + latents["reused"] == 5
    if after.status == 0:
        assert (latents["encoded"], text["encoded"]) == (0, 0), "finished work is not repeated"


@pytest.mark.parametrize("service", ["database", "gateway"])
def test_O13_a_training_survives_an_outage_or_ends_with_a_fix_and_nothing_is_lost(
    pair: Pair, gateway: Gateway, database: PostgresServer, tmp_path: Path, *, service: str
) -> None:
    """The outage starts with the upload of the first checkpoint."""
    stopped = gateway if service == "gateway" else database
    command = latentline("run", "small")
    after = outage(pair, stopped, "/checkpoints/step-00000002/", command, tmp_path / "copies")
    report = after.report("trained_lora")
    assert report["steps"] == 4
    assert lora(after.after_rerun)
    assert len(list((after.after_rerun / "runs").glob("*/checkpoints/*/COMPLETE"))) == 2
    if after.status == 0:
        assert not report["launched"], "a finished training is not repeated"
