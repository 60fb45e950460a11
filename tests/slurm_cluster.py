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
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.free_ports import free_ports

VARIABLE = "LATENTLINE_SLURM"
LIBRARIES = "usr/lib/x86_64-linux-gnu"

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
NodeName={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=z2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str | None:
    """Return why no Slurm can be started here, or None."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "srun") if _program(name) is None]
    return f"{', '.join(missing)} not found; see tests/slurm_cluster.py" if missing else None


@contextmanager
def slurm_cluster(folder: Path) -> Generator[dict[str, str]]:
    """Run a Slurm of two nodes, this host and z2, and provide the environment of its users."""
    unpacked = os.environ.get(VARIABLE)
    libraries = Path(unpacked or "/", LIBRARIES)
    plugins = libraries / "slurm-wlm"
    (folder / "state").mkdir(parents=True)
    host = platform.node().partition(".")[0]
    names = {"host": host, "user": getpass.getuser(), "ports": free_ports(3)}
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(folder=folder, plugins=plugins, **names))
    environment = {"SLURM_CONF": str(config)}
    if unpacked:
        environment["LD_LIBRARY_PATH"] = f"{libraries}:{plugins}"
        environment["PATH"] = f"{unpacked}/usr/bin:{os.environ['PATH']}"

    stepd = _program("slurmstepd") or "slurmstepd"
    commands = [[_program("slurmctld"), "-D"]]
    commands += [[_program("slurmd"), "-D", "-N", node, "-d", stepd] for node in (host, "z2")]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / "daemons.txt").open("ab") as log:
                daemons.append(
                    subprocess.Popen(
                        [str(part) for part in command], env=os.environ | environment, stdout=log, stderr=log
                    )
                )
        _wait_until_idle(os.environ | environment)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(30)


def _wait_until_idle(environment: dict[str, str]) -> None:
    deadline_s = time.monotonic() + 60
    states = ""
    while time.monotonic() < deadline_s:
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        states = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
        if states.split() == ["idle", "idle"]:
            return
        time.sleep(0.2)
    raise AssertionError(f"the nodes of Slurm are not idle: {states}")


def _program(name: str) -> str | None:
    """Return the path of a program of Slurm; Debian adds -wlm to the names of daemons."""
    folders = [Path(os.environ.get(VARIABLE) or "/", "usr", each) for each in ("sbin", "bin")]
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    return shutil.which(f"{name}-wlm", path=path) or shutil.which(name, path=path)
