"""The machines of a training, from options and from the environments of torchrun, Slurm and Kubernetes."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import LaunchError
from pipeline.processes.cluster_variables import (
    MachineOptions,
    find_machines,
    first_host,
    parse_master,
    scheduler_job,
    without_cluster_variables,
)
from pipeline.processes.machines import Machines

WAIT_S = 30


def given(*values: Any, **named: Any) -> MachineOptions:
    """Return options with the wait `WAIT_S`."""
    return MachineOptions(*values, **named, wait_s=WAIT_S)


NOTHING = given()
OPTIONS = given(2, 1, "node1:29500")

TORCHRUN = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
KUBEFLOW = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
SLURM = {
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "gnode[10,20-21]",
    "SLURM_JOB_ID": "200505",
}
KUBERNETES = {"NNODES": "2", "JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Machines()),
        (TORCHRUN, Machines(3, 2, "node1", 29500, WAIT_S)),
        ({**TORCHRUN, "GROUP_RANK": "2"}, Machines(3, 2, "node1", 29500, WAIT_S)),
        (KUBEFLOW, Machines(2, 1, "job-master-0", 23456, WAIT_S)),
        (KUBERNETES, Machines(2, 1, "train-0.train", 1, WAIT_S)),
        (SLURM, Machines(2, 1, "gnode10", 15_000 + 200505 % 15_000, WAIT_S)),
        ({**SLURM, "MASTER_PORT": "7"}, Machines(2, 1, "gnode10", 7, WAIT_S)),
        # A step may use fewer nodes than its job.
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, Machines()),
        (
            {**SLURM, "SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "b[1-2]"},
            Machines(2, 1, "b1", 15_000 + 200505 % 15_000, WAIT_S),
        ),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", **KUBEFLOW, "RANK": "0"},
            Machines(2, 0, "job-master-0", 23456, WAIT_S),
        ),
    ],
    ids=[
        "nothing",
        "torchrun",
        "torchrun of group 2",
        "Kubeflow",
        "Kubernetes",
        "Slurm",
        "Slurm with a port",
        "Slurm step of one node",
        "Slurm step of two nodes",
        "torchrun in Kubeflow",
    ],
)
def test_schedulers_tell_the_machines(environ: dict[str, str], expected: Machines) -> None:
    assert find_machines(NOTHING, environ) == expected


def test_options_replace_all_variables() -> None:
    assert find_machines(OPTIONS, {**TORCHRUN, **SLURM}) == Machines(2, 1, "node1", 29500, WAIT_S)
    assert find_machines(given(rank=0, machines=3), TORCHRUN) == Machines(3, 0, "node1", 29500, WAIT_S)
    assert find_machines(given(machines=1), TORCHRUN) == Machines()
    # The launcher for Kubernetes passes all but the rank, which is the index of the pod.
    pod = given(machines=2, master="job-0.job:29500")
    assert find_machines(pod, {"JOB_COMPLETION_INDEX": "1"}) == Machines(2, 1, "job-0.job", 29500, WAIT_S)
    alone = given(machines=1, master="job-0.job:29500")
    assert find_machines(alone, {"JOB_COMPLETION_INDEX": "0"}) == Machines()
    assert find_machines(MachineOptions(2, 0, "a:1", wait_s=5), {}).wait_s == 5


@pytest.mark.parametrize(
    ("options", "environ", "what", "fix"),
    [
        (
            given(2, None, "a:1"),
            {},
            "rank of this machine must be from 0 to 1, but none",
            "--rank 0",
        ),
        (given(2, 2, "a:1"), {}, "must be from 0 to 1, got 2", "--rank 0"),
        (given(2, 0), {}, "the address of machine 0 is missing", "--master host:port"),
        (given(rank=1), {}, "the number of machines is missing", "--machines"),
        (
            given(2, 0, "a"),
            {},
            "must be host:port with a port from 1 to 65535, got 'a'",
            "node1:29500",
        ),
        (given(2, 0, "a:0"), {}, "got 'a:0'", "node1:29500"),
        (given(2, 0, "[::1]:5"), {}, "got '[::1]:5'", "IPv4"),
        (NOTHING, {**TORCHRUN, **SLURM}, "contradict each other: NNODES=3, SLURM_NNODES=2", "--machines"),
        (NOTHING, {**TORCHRUN, "NNODES": "1:4"}, "must be an integer, got '1:4'", "--machines"),
        (NOTHING, {**TORCHRUN, "NNODES": "0"}, "at least 1, got 0", "--machines"),
        (NOTHING, {**KUBEFLOW, "LOCAL_WORLD_SIZE": "2"}, "started several times", "--ntasks-per-node=1"),
        (NOTHING, {**SLURM, "SLURM_LOCALID": "1"}, "must be started once per machine", "--ntasks-per-node=1"),
    ],
)
def test_missing_and_contradicting_values_are_errors_with_a_fix(
    options: MachineOptions, environ: dict[str, str], what: str, fix: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        find_machines(options, environ)
    assert what in caught.value.what
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[003-005,9],m1", "n003"),
        ("n[9,3-5]", "n9"),
        ("rack[1-2]n[01-12],x", "rack1n01"),
        ("a[0]-b", "a0-b"),
    ],
)
def test_the_first_host_of_a_compact_list_is_machine_0(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_a_host_may_be_a_name_or_an_address() -> None:
    assert parse_master("10.0.0.1:29500") == ("10.0.0.1", 29500)
    assert parse_master("node1.cluster.local:65535") == ("node1.cluster.local", 65535)


def test_launched_processes_inherit_nothing_that_their_own_launcher_sets() -> None:
    environ = {**TORCHRUN, **KUBEFLOW, **SLURM, "PET_NPROC_PER_NODE": "4", "PATH": "/bin"}
    assert without_cluster_variables(environ) == {**SLURM, "PATH": "/bin"}


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": ""}, None),
        ({"SLURM_JOB_ID": "4711", "RAY_JOB_ID": "01"}, "Slurm 4711"),
        ({"RAY_JOB_ID": "01000000"}, "Ray 01000000"),
    ],
    ids=["none", "empty", "slurm", "ray"],
)
def test_a_process_knows_the_job_of_its_scheduler(environ: dict[str, str], job: str | None) -> None:
    assert scheduler_job(environ) == job
