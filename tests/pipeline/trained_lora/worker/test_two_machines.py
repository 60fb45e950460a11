"""`latentline train` on two machines: network namespaces of this host, each with its own copy of the run."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.processes.launch import TRAINING_MODULE, LocalLaunch
from pipeline.processes.worker.machine_watch import BEAT_S, SILENCE_S
from pipeline.trained_lora.job import TrainingJob
from tests.pipeline.trained_lora.equal_runs import assert_equal_runs
from tests.pipeline.trained_lora.two_machines import Machine, copied_order, wait_for_steps

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

pytestmark = [pytest.mark.machines, pytest.mark.slow]

STEPS = 24
PORT = 29_500
RESUME = "start the same commands again on all machines"


def call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@dataclass
class Cable:
    """Two network namespaces that are connected by a cable.

    Attributes:
        names: Names of the namespaces.
        hosts: Their addresses.
    """

    names: tuple[str, str]
    hosts: tuple[str, str]

    def pull(self) -> None:
        call("ip", "-n", self.names[1], "link", "set", "eth0", "down")


@pytest.fixture
def cable() -> Generator[Cable]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    names = (f"ll{os.getpid()}a", f"ll{os.getpid()}b")
    subnet = f"198.18.{os.getpid() % 250}"
    hosts = (f"{subnet}.1", f"{subnet}.2")
    try:
        for name in names:
            call("ip", "netns", "add", name)
        call("ip", "-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", names[1])
        for name, host in zip(names, hosts, strict=True):
            call("ip", "-n", name, "address", "add", f"{host}/24", "dev", "eth0")
            call("ip", "-n", name, "link", "set", "eth0", "up")
            call("ip", "-n", name, "link", "set", "lo", "up")
        yield Cable(names, hosts)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def start(cable: Cable, tmp_path: Path) -> Generator[Callable[[TrainingJob], list[Machine]]]:
    """Return a function that starts a run on both machines; machine 1 has an empty disk each time."""
    started: list[Machine] = []

    def begin(job: TrainingJob) -> list[Machine]:
        disk = tmp_path / f"disk-{len(started)}"
        orders = [job.write(), copied_order(job, disk)]
        machines = [
            Machine(
                rank,
                order,
                f"{cable.hosts[0]}:{PORT}",
                tmp_path / f"output-{len(started)}-{rank}.txt",
                prefix=("ip", "netns", "exec", cable.names[rank]),
                wait_s=180,
            ).start()
            for rank, order in enumerate(orders)
        ]
        started.extend(machines)
        return machines

    yield begin
    for machine in started:
        machine.kill()


@pytest.mark.timeout(1800)
def test_H03_two_machines_train_the_lora_of_one_although_each_dies_once(
    make_project: Callable[..., Project], start: Callable[[TrainingJob], list[Machine]]
) -> None:
    project = make_project(steps=STEPS, checkpoint_every=4, gradient_accumulation=1)
    alone = project.changed("one_machine", num_processes=2).job()
    LocalLaunch(alone.recipe.accelerate)(TRAINING_MODULE, alone.write())

    job = project.changed("two_machines", num_processes=2).job()
    for dying, num_steps in ((1, 6), (0, 14)):
        machines = start(job)
        wait_for_steps(job, num_steps, *machines)
        machines[dying].kill()
        killed_s = time.monotonic()
        survivor = machines[1 - dying]
        assert survivor.end() == 1, survivor.text()
        assert time.monotonic() - killed_s < 60
        assert "another machine" in survivor.text()
        assert RESUME in survivor.text()

    machines = start(job)
    assert [machine.end(300) for machine in machines] == [0, 0], machines[0].text() + machines[1].text()
    assert_equal_runs(job, alone, STEPS)


@pytest.mark.timeout(1200)
def test_both_machines_end_within_two_minutes_after_their_cable_is_pulled(
    make_project: Callable[..., Project], start: Callable[[TrainingJob], list[Machine]], cable: Cable
) -> None:
    job = make_project(steps=5000).changed("two_machines", num_processes=2).job()
    machines = start(job)
    wait_for_steps(job, 3, *machines)
    # Until its first beat is heard, a machine counts as lost after START_S instead of SILENCE_S.
    time.sleep(5 * BEAT_S)
    cable.pull()
    pulled_s = time.monotonic()
    assert [machine.end(SILENCE_S + 60) for machine in machines] == [1, 1]
    assert time.monotonic() - pulled_s < SILENCE_S + 2 * BEAT_S + 30
    for machine, other in zip(machines, ("machine 1", "machine 0"), strict=True):
        assert f"{other} of 2 stopped responding" in machine.text()
        assert RESUME in machine.text()


@pytest.mark.timeout(1200)
def test_SIGTERM_to_one_machine_stops_both_after_a_checkpoint(
    make_project: Callable[..., Project], start: Callable[[TrainingJob], list[Machine]]
) -> None:
    job = make_project(steps=5000).changed("two_machines", num_processes=2).job()
    machines = start(job)
    wait_for_steps(job, 3, *machines)
    machines[1].process.terminate()
    assert [machine.end(300) for machine in machines] == [1, 143]
    assert "stopped on request of another process" in machines[0].text()
    assert "it was stopped: start the job again, and it resumes" in machines[0].text()
    assert list(job.folder.glob("checkpoints/step-*/COMPLETE"))
