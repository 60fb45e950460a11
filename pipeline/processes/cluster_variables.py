"""The machines of a training from the options of a command, or from the variables that schedulers set.

                 option        torchrun, Kubeflow               Slurm
    machines     --machines    NNODES, PET_NNODES               SLURM_STEP_NUM_NODES or SLURM_NNODES
    rank         --rank        NODE_RANK, GROUP_RANK,           SLURM_NODEID
                               PET_NODE_RANK                    (JOB_COMPLETION_INDEX of Kubernetes' Jobs)
    host         --master      MASTER_ADDR, PET_MASTER_ADDR     first host of SLURM_STEP_NODELIST or
                                                                SLURM_JOB_NODELIST
    port         --master      MASTER_PORT, PET_MASTER_PORT     derived from SLURM_JOB_ID

An option replaces all variables of its line. Without one, variables that contradict each other are an error.
WORLD_SIZE and RANK count processes. They are used only if the first two lines have no variable, and only if
each machine has one process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pipeline.errors import LaunchError
from pipeline.processes.machines import ONE_MACHINE, Machines

_FIRST_PORT, _NUM_PORTS = 15_000, 15_000
"""Ports for Slurm's jobs, below those that systems give to outgoing connections."""

_MACHINES = (("NNODES",), ("PET_NNODES",), ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"))
"""Variables by source; of one source, the first that is set counts."""

_RANK = (("NODE_RANK",), ("GROUP_RANK",), ("PET_NODE_RANK",), ("SLURM_NODEID",), ("JOB_COMPLETION_INDEX",))
_HOST = (("MASTER_ADDR",), ("PET_MASTER_ADDR",))
_PORT = (("MASTER_PORT",), ("PET_MASTER_PORT",))
_NODE_LIST = (("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),)

_PER_PROCESS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")

_PER_MACHINE = ("NNODES", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_Sources: TypeAlias = Sequence[Sequence[str]]

_FIX = "pass --machines, --rank and --master host:port, which replace the variables"


@dataclass(frozen=True)
class MachineOptions:
    """Options of `latentline train`; None for an option that was not given."""

    machines: int | None = None
    rank: int | None = None
    master: str | None = None
    wait_s: int = field(kw_only=True)


def find_machines(options: MachineOptions, environ: Mapping[str, str]) -> Machines:
    """Return the machines that the options and the environment describe; one machine if neither does.

    Raises:
        LaunchError: A value is missing or invalid, or two contradict each other.
    """
    _require_one_per_machine(environ)
    number = options.machines
    if number is None and (options.rank is not None or options.master is not None):
        raise LaunchError(
            "the number of machines is missing, which --rank and --master require",
            where="--machines",
            fix="pass --machines, or omit --rank and --master to use the scheduler's variables",
        )
    if number is None:
        number = _number(environ, _MACHINES, otherwise="WORLD_SIZE")
    if number is None:
        return ONE_MACHINE
    if number == 0:
        raise LaunchError(
            "the number of machines must be at least 1, got 0", where=_names(_MACHINES), fix=_FIX
        )

    rank = options.rank
    if rank is None:
        rank = 0 if number == 1 else _number(environ, _RANK, otherwise="RANK")
    if rank is None or not 0 <= rank < number:
        raise LaunchError(
            f"the rank of this machine must be from 0 to {number - 1}, "
            + ("but none is given" if rank is None else f"got {rank}"),
            where=f"--rank, {_names(_RANK)}",
            fix="pass --rank 0 on one machine, and consecutive ranks on all other machines",
        )
    if number == 1:
        return ONE_MACHINE
    host, port = _meeting_point(environ) if options.master is None else parse_master(options.master)
    return Machines(number, rank, host, port, options.wait_s)


def without_cluster_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that accelerate's launcher reads or sets."""
    return {
        name: value
        for name, value in environ.items()
        if name not in (*_PER_PROCESS, *_PER_MACHINE) and not name.startswith("PET_")
    }


def scheduler_job(environ: Mapping[str, str]) -> str | None:
    """Return the scheduler's job that this process belongs to, such as "Slurm 4711"; None outside of one."""
    for scheduler, name in (("Slurm", "SLURM_JOB_ID"), ("Ray", "RAY_JOB_ID")):
        if environ.get(name):
            return f"{scheduler} {environ[name]}"
    return None


def parse_master(text: str, *, where: str = "--master") -> tuple[str, int]:
    """Return host and port of a text such as "node1:29500", which comes from `where`.

    Raises:
        LaunchError: The text has another form, or the port cannot exist.
    """
    host, _, port = text.rpartition(":")
    if host and ":" not in host and port.isdecimal() and 0 < int(port) < 2**16:
        return host, int(port)
    raise LaunchError(
        f"the address of machine 0 must be host:port with a port from 1 to 65535, got {text!r}",
        where=where,
        fix="use a host name or an IPv4 address, for example node1:29500",
    )


def first_host(node_list: str) -> str:
    """Return the first host of Slurm's compact form: "n[03-05,9],m1" begins with "n03"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    assert first is not None, "the pattern matches an empty text"
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]).strip()


def _meeting_point(environ: Mapping[str, str]) -> tuple[str, int]:
    host, port = _text(environ, _HOST), _number(environ, _PORT)
    nodes, job = _text(environ, _NODE_LIST), _number(environ, (("SLURM_JOB_ID",),))
    if host is None and nodes is not None:
        host = first_host(nodes)
    if port is None and job is not None:
        # All machines compute the same port without communication, and two jobs on a node hardly ever share
        # one.
        port = _FIRST_PORT + job % _NUM_PORTS
    if not host or port is None:
        raise LaunchError(
            "the address of machine 0 is missing",
            where="--master, MASTER_ADDR and MASTER_PORT, SLURM_JOB_NODELIST and SLURM_JOB_ID",
            fix="pass --master host:port on every machine: a name or address of machine 0 that all of them "
            "can reach, and a free port on it",
        )
    return parse_master(f"{host}:{port}")


def _require_one_per_machine(environ: Mapping[str, str]) -> None:
    # accelerate's launcher starts the processes of a machine, so a scheduler must start this command once on
    # each.
    local_size = _number(environ, (("LOCAL_WORLD_SIZE",),)) or 1
    local_rank = max(_number(environ, ((name,),)) or 0 for name in ("LOCAL_RANK", "SLURM_LOCALID"))
    if local_size > 1 or local_rank > 0:
        raise LaunchError(
            "latentline train must be started once per machine, but it was started several times on this one",
            where="LOCAL_WORLD_SIZE, LOCAL_RANK, SLURM_LOCALID",
            fix="use srun --ntasks-per-node=1; without Slurm, start the command itself instead of torchrun",
        )


def _number(environ: Mapping[str, str], sources: _Sources, *, otherwise: str = "") -> int | None:
    """Return the number in the variables of all sources, or in `otherwise`, which counts processes."""
    text = _text(environ, sources)

    # The number of processes is the number of machines only if each machine has one process.
    if text is None and environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        sources = ((otherwise,),)
        text = _text(environ, sources)
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    names = _names(sources)
    what = f"an environment variable of the scheduler must be an integer, got {text!r}"
    raise LaunchError(what, where=f"one of {names}", fix=_FIX)


def _text(environ: Mapping[str, str], sources: _Sources) -> str | None:
    """Return the value on which all sources agree; None if no variable is set."""
    values = dict[str, str]()
    for names in sources:
        name = next((name for name in names if environ.get(name, "").strip()), None)
        if name is not None:
            values[name] = environ[name].strip()
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{name}={value}" for name, value in values.items())
        what = f"environment variables contradict each other: {listed}"
        raise LaunchError(what, where="the environment of latentline train", fix=_FIX)
    return next(iter(values.values()), None)


def _names(sources: _Sources) -> str:
    return ", ".join(name for names in sources for name in names)
