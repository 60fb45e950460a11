"""A machine on this host, with its own network, host name, process ids and disk.

Machines share the host's CPU, clock and installed programs, which includes the project's code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.machines.children import Child, call, until
from tests.machines.network import Network

_INIT = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap orphans at once, so that a killed process is gone
while True:
    signal.pause()
"""

_START = """
set -e
hostname "$1"
mount --bind "$2" "$3"
mount -t tmpfs -o mode=0700 tmpfs "$4"
mount -t tmpfs tmpfs /dev/shm
exec "$5" -c "$6"
"""


class Machine:
    """Namespaces in which commands run, and a disk that only they see at its path.

    All machines of a test see their own disk at the same path, as two servers with the same folders do.

    Attributes:
        name: Host name.
        disk: Path of the disk within the machine.
        address: Address in the test's network.
    """

    def __init__(self, name: str, *, folder: Path, network: Network, environment: dict[str, str]) -> None:
        """Start the machine.

        Args:
            name: Host name.
            folder: Folder of the test, in which all of its machines are.
            network: Network to plug into.
            environment: Variables of every command, in addition to a minimal environment.
        """
        self.name = name
        self.disk = folder / "disk"
        self._on_host = folder / "disks" / name
        self._environment = environment
        self._started: list[Child] = []
        for path in (self.disk, self._on_host, self._on_host / "tmp", self._on_host / "home"):
            path.mkdir(parents=True, exist_ok=True)

        namespaces = ["--net", "--uts", "--ipc", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
        script = [name, str(self._on_host), str(self.disk), str(folder / "disks"), sys.executable, _INIT]
        log = folder / f"{name}.log"
        self._unshare = Child(["unshare", *namespaces, "sh", "-c", _START, "sh", *script], log=log)
        until(self._is_ready, f"machine {name} starts", seconds=20, child=self._unshare)
        self.address = network.plug_in(self._init_pid)

    def path(self, name: str) -> Path:
        """Return where a file on the machine's disk is on the host, for the test to read and write."""
        return self._on_host / name

    def run(
        self, command: Sequence[str], *, timeout_s: float = 800, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine to its end; working directory is the disk."""
        return subprocess.run(
            self._entered(command),
            env=self._variables(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def start(self, command: Sequence[str], *, log: str, **environment: str) -> Child:
        """Start a command on the machine, with its output in the file `log` of the disk."""
        child = Child(self._entered(command), log=self.path(log), environment=self._variables(environment))
        self._started.append(child)
        return child

    def pids(self, text: str) -> list[int]:
        """Return the process ids on the machine whose command line contains `text`."""
        found = self.run(["pgrep", "--full", "--", text])
        return [int(line) for line in found.stdout.split()]

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process, by its id on the machine."""
        call(*self._entered(["kill", f"-{number.value}", str(pid)]))

    def kill_all(self) -> None:
        """Kill all processes at once, as a power cut would; the machine itself can be used at once."""
        pids = [str(pid) for pid in self.pids(".") if pid != 1]
        call(*self._entered(["kill", "-9", *pids]), check=False)  # some may have ended since

    def stop(self) -> None:
        """Take the machine away, as a power cut would: all of its processes are killed. The disk stays."""
        self._unshare.kill()
        for child in self._started:
            child.wait(20)

    @property
    def _init_pid(self) -> int:
        """Host's id of the machine's first process."""
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text("ascii")
        return int(children.split()[0])

    def _is_ready(self) -> bool:
        try:
            return b"signal.pause" in Path(f"/proc/{self._init_pid}/cmdline").read_bytes()
        except (OSError, IndexError):
            return False

    def _entered(self, command: Sequence[str]) -> list[str]:
        namespaces = ["--net", "--uts", "--ipc", "--pid", "--mount"]
        on_disk = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.disk)]
        return ["nsenter", "--target", str(self._init_pid), *namespaces, "--", *on_disk, *command]

    def _variables(self, environment: dict[str, str]) -> dict[str, str]:
        base = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_WAIT_POLICY") if name in os.environ}
        own = {"HOME": str(self.disk / "home"), "TMPDIR": str(self.disk / "tmp"), "DO_NOT_TRACK": "1"}
        return {**base, **own, **self._environment, **environment}


@contextmanager
def machines(
    *names: str, folder: Path, network: Network, environment: dict[str, str]
) -> Generator[list[Machine]]:
    """Provide running machines, and stop them after the body."""
    started: list[Machine] = []
    try:
        for name in names:
            started.append(Machine(name, folder=folder, network=network, environment=environment))
        yield started
    finally:
        for machine in started:
            machine.stop()
