"""A training on two machines that share only an S3 server and a database; each of them dies once."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest

from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from tests.machines.children import Child, until
from tests.machines.counting_proxy import Request
from tests.machines.outputs import downloaded, lora
from tests.machines.project import Project, latentline, step_of
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.machines.pair import Pair

STEPS = 60

PORT = 29_500

COMMAND = re.compile(r"on machine 1: latentline (train \S+ --machines 2 --rank 1 --master \S+)")

SETTINGS = {
    "accelerate": {"num_processes": 2},
    "training": {
        "steps": STEPS,
        "batch_size": 1,
        "checkpoint_every": 10,
        "sample_every": 0,
        "lora": {"rank": 2, "alpha": 2.0},
    },
}


class AtUpload:
    """Calls a function once, when the first file with a name that contains `part` is uploaded."""

    def __init__(self, part: str, function: Callable[[], object]) -> None:
        self.is_over = threading.Event()
        self._part, self._function = part, function
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> None:
        with self._lock:
            if request.method == "PUT" and self._part in request.name and not self.is_over.is_set():
                self._function()
                self.is_over.set()
                raise ConnectionResetError("the request of this test's choice is lost")


def started(master: Project, other: Project, name: str) -> tuple[Child, Child]:
    """Start the training on both machines, each with an empty scratch disk; `name` is that of the logs."""
    for project in (master, other):
        shutil.rmtree(project.machine.path("scratch"), ignore_errors=True)
    launcher = {"kind": "local", "machines": 2, "master": f"{master.machine.address}:{PORT}"}
    master.deploy(pools="machine", launcher=launcher)
    job = master.start(step_of("trained_lora"), log=f"{name}.log")
    until(lambda: COMMAND.search(job.output()), "the command for machine 1", seconds=600, child=job)
    command = COMMAND.search(job.output())
    assert command is not None
    return job, other.start(latentline(*command[1].split()), log=f"{name}.log")


def assert_ended_with_fix(process: Child) -> None:
    assert process.wait(300) == 1, process.output()[-3000:]
    assert "another machine" in process.output()
    assert "start the same commands again on all machines" in process.output()


@pytest.mark.timeout(3600)
def test_two_machines_train_the_lora_of_one_although_each_dies_once_and_its_disk_is_lost(
    pair: Pair, s3: str, tmp_path: Path
) -> None:
    """In the last attempt the machines change places, and neither has any file of the run on its disk."""
    pair.a.write_recipe(output_dir=f"{s3}/alone", **SETTINGS)
    alone = pair.a.latentline("run", "small")
    assert alone.returncode == 0, alone.stderr[-3000:]
    expected = downloaded(f"{s3}/alone", tmp_path / "expected")

    # The tables before the training, at another address.
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    for folder in ("tables", "reports"):
        files.copy(f"{s3}/alone/{folder}", f"{s3}/out/{folder}", recursive=True)
    for project in (pair.a, pair.b):
        project.write_recipe(output_dir=f"{s3}/out", **SETTINGS)

    pair.proxy.before = kill = AtUpload("step-00000010/COMPLETE", pair.b.machine.kill_all)
    job, other = started(pair.a, pair.b, "first")
    until(kill.is_over.is_set, "the upload of step 10", seconds=600, child=job)
    assert_ended_with_fix(job)
    other.wait(60)

    pair.proxy.before = kill = AtUpload("step-00000040/", pair.a.machine.kill_all)
    job, other = started(pair.a, pair.b, "second")
    until(kill.is_over.is_set, "the upload of step 40", seconds=600, child=other)
    assert_ended_with_fix(other)
    job.wait(60)

    job, other = started(pair.b, pair.a, "third")
    assert (job.wait(600), other.wait(60)) == (0, 0), job.output()[-3000:] + other.output()[-3000:]
    resumed = re.search(r"resuming from the checkpoint of step (\d+)", job.output())
    assert resumed is not None, job.output()[-3000:]
    assert 10 <= int(resumed[1]) < 40, "the upload of step 40 was lost with its machine"

    actual = downloaded(f"{s3}/out", tmp_path / "actual")
    assert differing_tensors(lora(actual), lora(expected)) == []
    layouts = [
        RunLayout(next((outputs / "runs").glob("*/run.json")).parent) for outputs in (actual, expected)
    ]
    losses = [[line["loss"] for line in read_metrics(layout.metrics, STEPS)] for layout in layouts]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS
    assert layouts[0].folder.name == layouts[1].folder.name, "the id of a run does not depend on the machines"
