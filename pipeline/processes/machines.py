"""The machines of one training: their number, the rank of this one, and the address where they meet.

    machine 0    hosts the meeting point, a TCP port, and the first processes
    machine 1    connects to it, and hosts the next processes

`accelerate.num_processes` is the number of processes on all machines together, so that the plan of a run, and
with it the run's id, does not depend on the machines.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pipeline.errors import LaunchError, counted

if TYPE_CHECKING:
    from pipeline.recipe import AccelerateSettings

MACHINES_VARIABLE = "LATENTLINE_MACHINES"
"""Environment variable of launched processes with the `Machines` of a training, as JSON."""

GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interface that torch uses between processes on CPUs."""


@dataclass(frozen=True)
class Machines:
    """The machines of one training, as one of them sees them.

    Attributes:
        number: Number of machines.
        rank: Rank of this machine, from 0.
        host: Host name or IPv4 address of machine 0; empty for a single machine.
        port: Port on machine 0 where the machines meet; 0 for a single machine.
        wait_s: Seconds that a machine waits until all have started; 0 for a single machine.
    """

    number: int = 1
    rank: int = 0
    host: str = ""
    port: int = 0
    wait_s: int = 0

    @property
    def address(self) -> str:
        """The meeting point, such as "node1:29500"."""
        return f"{self.host}:{self.port}"

    def num_processes_here(self, settings: AccelerateSettings) -> int:
        """Return the number of processes on each machine; raises LaunchError if the numbers would differ."""
        total = settings.num_processes
        if total % self.number == 0:
            return total // self.number
        raise LaunchError(
            f"accelerate.num_processes must be divisible by the number of machines, got {total} on "
            f"{counted(self.number, 'machine')}",
            where="accelerate.num_processes",
            fix="it is the number of processes on all machines together: set it to the number of machines "
            "times the GPUs of one, or change the number of machines",
        )

    def on_one(self, settings: AccelerateSettings) -> AccelerateSettings:
        """Return the settings of a launch that uses this machine alone, such as encoding."""
        return settings.model_copy(update={"num_processes": self.num_processes_here(settings)})

    def command_of_others(self, job: str) -> str:
        """Return a log line with the command to start on the other machines.

        `job` is the path or address where these machines find the training's job.
        """
        rank = "1" if self.number == 2 else "<rank>"
        ranks = (
            "machine 1" if self.number == 2 else f"machines 1 to {self.number - 1}, each with its own rank"
        )
        options = f"--machines {self.number} --rank {rank} --master {self.address}"
        return f"on {ranks}: latentline train {shlex.quote(job)} {options}"

    def environment(self) -> dict[str, str]:
        """Return the environment variables for the processes of a training on several machines."""
        if self.number == 1:
            return {}
        variables = {MACHINES_VARIABLE: json.dumps(asdict(self))}
        interface = interface_towards(self.host)
        if interface is not None and GLOO_INTERFACE_VARIABLE not in os.environ:
            # By default, gloo listens at the address of the host's name, often 127.0.1.1 on Debian.
            variables[GLOO_INTERFACE_VARIABLE] = interface
        return variables


ONE_MACHINE = Machines()


def machines_of_this_process() -> Machines:
    """Return the machines of the training that this launched process belongs to."""
    text = os.environ.get(MACHINES_VARIABLE)
    return Machines(**json.loads(text)) if text else ONE_MACHINE


def interface_towards(host: str) -> str | None:
    """Return the network interface with the route to a host; None without one. Nothing is sent."""
    import psutil

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # any port: connecting a UDP socket only chooses its own address
            own_address = probe.getsockname()[0]
    except OSError:
        return None
    # Other machines cannot reach the loopback interface, even if a host's own name belongs to it.
    if own_address.startswith("127.") and host != "localhost" and not host.startswith("127."):
        return None
    names = (
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.address == own_address for address in addresses)
    )
    return next(names, None)
