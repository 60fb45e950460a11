"""The S3 gateway or PostgreSQL stops for 30 s in the middle of a job."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import fsspec
import pytest
from dagster import DagsterRunStatus
from safetensors.numpy import load

from tests.e2e.postgres_server import PostgresServer
from tests.machines.ceph import Gateway
from tests.machines.children import until
from tests.machines.counting_proxy import Request
from tests.machines.project import latentline

if TYPE_CHECKING:
    from tests.machines.conftest import Pair

OUTAGE_S = 30


class StopAtFirstEntry:
    """Stops a service when the first entry of a kind is written, before the gateway receives it."""

    def __init__(self, service: Gateway | PostgresServer, kind: str) -> None:
        self.is_stopped = threading.Event()
        self._service, self._part = service, f"/{kind}/"
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> None:
        with self._lock:
            if not self.is_stopped.is_set() and request.method == "PUT" and self._part in request.name:
                self._service.stop()
                self.is_stopped.set()


@pytest.mark.slow
@pytest.mark.parametrize(("service", "kind"), [("gateway", "latents"), ("database", "text")])
def test_O13_a_cache_job_survives_an_outage_or_ends_with_a_fix_and_nothing_is_lost(
    pair: Pair, gateway: Gateway, database: PostgresServer, *, service: str, kind: str
) -> None:
    stopped = gateway if service == "gateway" else database
    pair.proxy.before = stop = StopAtFirstEntry(stopped, kind)
    command = latentline("run", "small", "--cache-only")
    job = pair.a.machine.start(command, log="run.log", **pair.a.variables())
    until(stop.is_stopped.is_set, f"the first entry of {kind}", seconds=600, child=job)
    time.sleep(OUTAGE_S)
    # Not in another thread: the kernel ends the gateway together with the thread that starts it.
    stopped.start()
    status = job.wait(900)

    files = fsspec.filesystem("s3", skip_instance_cache=True)
    for name in files.find(pair.a.cache):
        if name.endswith(".safetensors"):
            assert load(files.cat_file(name)), f"{name} is torn"

    if status:
        assert "where:" in job.output(), job.output()[-3000:]
        assert "fix:" in job.output()
        completed = pair.a.latentline("run", "small", "--cache-only")
        assert completed.returncode == 0, completed.stderr[-3000:]
    latents, text = pair.a.report("vae_latents"), pair.a.report("text_embeddings")
    assert (latents["samples"], latents["failed"], text["samples"], text["failed"]) == (5, 0, 5, 0)
    assert latents["encoded"] + latents["reused"] == 5
    (run, *_) = pair.instance.get_runs()
    assert run.status == DagsterRunStatus.SUCCESS
