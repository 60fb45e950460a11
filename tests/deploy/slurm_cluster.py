"""A Slurm cluster of Debian's packages with several nodes, all of them processes of this machine."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.e2e.daemon import running, until

SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun")
NUM_GPUS = 4
DEV_NULL = (1, 3)
"""Device that takes the place of a GPU; Slurm only looks for its file and passes its number on."""

SETTINGS = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = """\
NodeName={name} NodeHostName={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=200000 Gres=gpu:{gpus}
"""


def missing_programs() -> list[str]:
    """Return the programs that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]


class SlurmCluster:
    """A running cluster.

    Attributes:
        environment: Variables for Slurm's programs.
    """

    def __init__(self, folder: Path) -> None:
        """Use the configuration in `folder`."""
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": SEARCH_PATH}

    def call(self, *command: str, cwd: Path, **variables: str) -> str:
        """Run one of Slurm's programs, and return its standard output."""
        environment = {**self.environment, **variables}
        completed = subprocess.run(
            command, env=environment, cwd=cwd, capture_output=True, text=True, check=False
        )
        assert completed.returncode == 0, completed.stderr
        return completed.stdout.strip()


@contextmanager
def slurm_cluster(folder: Path, nodes: Sequence[str]) -> Generator[SlurmCluster]:
    """Provide a cluster during the body; its processes end afterwards.

    Args:
        folder: An empty folder for its configuration, state and logs.
        nodes: Names of the nodes. Each has eight cores and `NUM_GPUS` devices.
    """
    _write_settings(folder, nodes)
    commands = {
        "slurmctld": ["slurmctld", "-D", "-c"],
        **{name: ["slurmd", "-D", "-N", name] for name in nodes},
    }
    cluster = SlurmCluster(folder)
    with ExitStack() as stack:
        for name, (program, *options) in commands.items():
            path = shutil.which(program, path=SEARCH_PATH)
            assert path is not None
            log = folder / f"{name}.log"
            command = [path, *options]
            stack.enter_context(running(command, environment=cluster.environment, cwd=folder, log=log))
        idle = ["sinfo", "--noheader", "--format=%D %t"]
        until(
            lambda: _output(idle, cluster) == f"{len(nodes)} idle",
            "idle nodes",
            seconds=120,
            log=folder / "slurmctld.log",
        )
        yield cluster


def _output(command: list[str], cluster: SlurmCluster) -> str:
    """Return the output of a command that may fail while the cluster starts."""
    completed = subprocess.run(
        command, env=cluster.environment, capture_output=True, text=True, check=False, timeout=60
    )
    time.sleep(0.3)
    return completed.stdout.strip()


def _write_settings(folder: Path, nodes: Sequence[str]) -> None:
    host = platform.node().split(".")[0]
    settings = SETTINGS.format(host=host, port=_free_port(), folder=folder)
    for name in nodes:
        settings += NODE.format(name=name, host=host, port=_free_port(), gpus=NUM_GPUS)
    (folder / "slurm.conf").write_text(settings, encoding="utf-8")
    for index in range(NUM_GPUS):
        os.mknod(folder / f"gpu{index}", stat.S_IFCHR | 0o600, os.makedev(*DEV_NULL))
    gres = f"Name=gpu File={folder}/gpu[0-{NUM_GPUS - 1}]\n"
    (folder / "gres.conf").write_text(gres, encoding="utf-8")
    (folder / "state").mkdir()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
