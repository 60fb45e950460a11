"""A real Slurm of two nodes on this machine: `slurmctld` and two `slurmd`, without authentication.

Debian's packages slurmctld, slurmd and slurm-client contain the programs. They need not be installed:
LATENTLINE_SLURM may name a folder into which they were unpacked, with libhwloc15 and libmunge2:

    apt-get download slurmctld slurmd slurm-client slurm-wlm-basic-plugins libhwloc15 libmunge2
    for package in *.deb; do dpkg -x $package slurm; done
"""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.daemon import running, until
from tests.free_ports import free_ports

VARIABLE = "LATENTLINE_SLURM"
LIBRARIES = "usr/lib/x86_64-linux-gnu"

DEV_NULL = (1, 3)
"""Device that takes the place of a GPU; Slurm only looks for its file and passes its number on."""

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = """\
NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=200000 {gpus}
"""


def why_no_slurm() -> str | None:
    """Return why no Slurm can be started here, or None."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "srun") if _program(name) is None]
    return f"{', '.join(missing)} not found; see tests/launchers/slurm_cluster.py" if missing else None


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster.

    Attributes:
        variables: Environment variables for Slurm's programs.
    """

    variables: dict[str, str]

    def call(self, *command: str, cwd: Path, **variables: str) -> str:
        """Run one of Slurm's programs, and return its standard output."""
        completed = self._run(*command, cwd=cwd, **variables)
        assert completed.returncode == 0, completed.stderr
        return completed.stdout.strip()

    def is_idle(self, num_nodes: int) -> bool:
        """Return whether so many nodes are idle; False as well while the cluster starts."""
        output = self._run("sinfo", "--noheader", "--format=%D %t", cwd=Path.cwd()).stdout
        return output.strip() == f"{num_nodes} idle"

    def use(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
        """Use the cluster's commands in this process; return a scratch folder in `folder`."""
        for name, value in self.variables.items():
            monkeypatch.setenv(name, value)
        return folder / "scratch"

    def processes(self, *words: str, **environment: str) -> list[psutil.Process]:
        """Return the processes of the cluster with these words in their command, and these variables."""
        wanted = {"SLURM_CONF": self.variables["SLURM_CONF"], **environment}.items()
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if wanted <= process.environ().items() and set(words) <= set(process.cmdline()):
                    found.append(process)
        return found

    def kill_node(self, name: str) -> None:
        """Kill the daemon of a node and all tasks on it at once, as if it lost its power."""
        tasks = self.processes(SLURMD_NODENAME=name)
        # The parents of the first processes are Slurm's own, which have no variables of the job.
        parents = [parent for task in tasks if (parent := task.parent()) is not None and parent not in tasks]
        processes = [*self.processes("-N", name), *parents, *tasks]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them may react to the death of another
            for process in processes:
                process.send_signal(number)

    def _run(self, *command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **self.variables, **variables}
        return subprocess.run(
            command, env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=600
        )


@contextmanager
def slurm_cluster(folder: Path, *, num_gpus: int = 0) -> Generator[SlurmCluster]:
    """Run a Slurm of two nodes, this host and z2, until the end of the body.

    Args:
        folder: A new folder for its configuration, state and logs.
        num_gpus: Number of devices of each node in place of GPUs; they need root.
    """
    (folder / "state").mkdir(parents=True)
    host = platform.node().partition(".")[0]
    nodes = (host, "z2")
    spool = Path(
        tempfile.mkdtemp(prefix="slurm-")
    )  # short: Slurm's sockets are in it, and Linux allows 107 bytes
    _write_config(folder, spool, host, nodes, num_gpus)
    cluster = SlurmCluster(_variables(folder / "slurm.conf"))

    # Slurm recognises a daemon by the name of its program, to which Debian adds -wlm.
    daemons = {name: folder / name for name in ("slurmctld", "slurmd")}
    for name, link in daemons.items():
        link.symlink_to(str(_program(name)))
    commands = {"slurmctld": [daemons["slurmctld"], "-D"]}
    stepd = _program("slurmstepd")
    commands |= {node: [daemons["slurmd"], "-D", "-N", node, "-d", stepd] for node in nodes}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, spool)
        for name, command in commands.items():
            started = running(
                [str(part) for part in command],
                environment=os.environ | cluster.variables,
                cwd=folder,
                log=folder / f"{name}.txt",
            )
            stack.enter_context(started)
        log = folder / "slurmctld.txt"
        until(lambda: cluster.is_idle(len(nodes)), "idle nodes", seconds=120, log=log)
        yield cluster


def _write_config(folder: Path, spool: Path, host: str, nodes: Sequence[str], num_gpus: int) -> None:
    first_port, *ports = free_ports(1 + len(nodes))
    plugins = _libraries() / "slurm-wlm"
    text = CONFIG.format(
        folder=folder, spool=spool, plugins=plugins, host=host, user=getpass.getuser(), port=first_port
    )
    gpus = f"Gres=gpu:{num_gpus}" if num_gpus else ""
    for name, port in zip(nodes, ports, strict=True):
        text += NODE.format(name=name, host=host, port=port, gpus=gpus)
    (folder / "slurm.conf").write_text(text, encoding="utf-8")

    if num_gpus:
        for index in range(num_gpus):
            os.mknod(folder / f"gpu{index}", stat.S_IFCHR | 0o600, os.makedev(*DEV_NULL))
        gres = f"Name=gpu File={folder}/gpu[0-{num_gpus - 1}]\n"
        (folder / "gres.conf").write_text(gres, encoding="utf-8")


def _variables(config: Path) -> dict[str, str]:
    """Return the environment variables that Slurm's programs need."""
    variables = {"SLURM_CONF": str(config)}
    unpacked = os.environ.get(VARIABLE)
    if unpacked:
        libraries = _libraries()
        variables["LD_LIBRARY_PATH"] = f"{libraries}:{libraries / 'slurm-wlm'}"
        variables["PATH"] = f"{unpacked}/usr/bin:{os.environ['PATH']}"
    return variables


def _libraries() -> Path:
    return Path(os.environ.get(VARIABLE) or "/", LIBRARIES)


def _program(name: str) -> str | None:
    """Return the path of a program of Slurm; Debian adds -wlm to the names of daemons."""
    folders = [Path(os.environ.get(VARIABLE) or "/", "usr", each) for each in ("sbin", "bin")]
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    return shutil.which(f"{name}-wlm", path=path) or shutil.which(name, path=path)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Provide a cluster for the tests of a file."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running_cluster:
        yield running_cluster
