"""The batch scripts on a real Slurm of two nodes. A script takes the place of `latentline`."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.e2e.daemon import until
from tests.launchers.slurm_cluster import SlurmCluster, slurm_cluster, why_no_slurm

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"

REPORT = """#!/bin/sh
echo "node $SLURM_NODEID of $SLURM_NNODES, task $SLURM_ARRAY_TASK_ID, GPUs $CUDA_VISIBLE_DEVICES: $*"
"""

SLOW_TO_STOP = """#!/usr/bin/env python3
import os, signal, sys, time

def stop(number, frame):
    print(f"node {node} was stopped", flush=True)
    if node == "0":
        time.sleep(5)
        print("node 0 wrote its checkpoint", flush=True)
    sys.exit(143)

node = os.environ["SLURM_NODEID"]
signal.signal(signal.SIGTERM, stop)
print(f"node {node} trains", flush=True)
time.sleep(300)
"""
"""Stands for a training in which node 0 still writes the checkpoint when the other node has ended."""

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm())),
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemons of Slurm need root"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster", num_gpus=4) as running_cluster:
        yield running_cluster


def program(folder: Path, text: str) -> str:
    """Write an executable script in place of `latentline`, and return its path."""
    file = folder / "latentline"
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)
    return str(file)


def test_a_training_has_one_task_on_each_node_with_its_gpus(cluster: SlurmCluster, tmp_path: Path) -> None:
    options = ["--wait", "--nodes=2", "--gpus-per-node=4", "--cpus-per-task=2", "--output=log"]
    script = str(DEPLOY / "train.sbatch")
    latentline = program(tmp_path, REPORT)
    cluster.call("sbatch", *options, script, "runs/a", cwd=tmp_path, LATENTLINE=latentline)
    assert sorted((tmp_path / "log").read_text().splitlines()) == [
        "node 0 of 2, task , GPUs 0,1,2,3: train runs/a",
        "node 1 of 2, task , GPUs 0,1,2,3: train runs/a",
    ]


@pytest.mark.parametrize("tasks", ["0-3", "2"])
def test_each_task_of_the_array_encodes_on_its_gpu(cluster: SlurmCluster, tmp_path: Path, tasks: str) -> None:
    options = ["--wait", f"--array={tasks}", "--cpus-per-task=2", "--output=log-%a"]
    script = str(DEPLOY / "encode.sbatch")
    latentline = program(tmp_path, REPORT)
    cluster.call("sbatch", *options, script, "s3://bucket/orders/a", cwd=tmp_path, LATENTLINE=latentline)
    lines = {log.name: log.read_text().strip() for log in tmp_path.glob("log-*")}
    numbers = range(4) if tasks == "0-3" else [2]
    assert set(lines) == {f"log-{number}" for number in numbers}
    for number in numbers:
        head, tail = lines[f"log-{number}"].split(", GPUs ")
        assert head == f"node 0 of 1, task {number}"
        gpus, arguments = tail.split(": ")
        assert gpus.isdecimal()
        assert arguments == "encode s3://bucket/orders/a"


def test_a_node_that_ends_first_does_not_disturb_the_checkpoint_of_another(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.touch()
    options = ["--parsable", "--cpus-per-task=2", "--output=log"]
    script = str(DEPLOY / "train.sbatch")
    latentline = program(tmp_path, SLOW_TO_STOP)
    job = cluster.call("sbatch", *options, script, "runs/a", cwd=tmp_path, LATENTLINE=latentline)
    until(lambda: log.read_text().count("trains") == 2, "both nodes", seconds=120, log=log)
    cluster.call("scancel", "--signal=TERM", job, cwd=tmp_path)
    until(
        lambda: not cluster.call("squeue", "--noheader", cwd=tmp_path),
        "the end of the job",
        seconds=120,
        log=log,
    )
    lines = log.read_text().splitlines()
    assert lines.count("node 0 was stopped") == 1, "a second signal would end it before its checkpoint"
    assert "node 0 wrote its checkpoint" in lines
