"""Child processes of the rig, which the kernel ends even if the test process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep

import psutil


class Child:
    """A process in its own session, with its output in a file.

    The kernel kills it when the thread that started it ends, so that a killed test leaves no process.
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: dict[str, str] | None = None
    ) -> None:
        """Start `command`, and append its output to `log`."""
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, seconds: float) -> int:
        """Wait for the end, and return the exit status."""
        return self._process.wait(seconds)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, unless the process has ended, and wait for its end."""
        self._process.send_signal(number)
        self._process.wait(60)

    def kill_tree(self) -> None:
        """Kill the process and all of its descendants at once: none of them reacts to the end of another."""
        root = psutil.Process(self.pid)
        processes = [root, *root.children(recursive=True)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in processes:
                process.send_signal(number)
        self._process.wait(60)

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def until(condition: Callable[[], object], what: str, *, seconds: float, child: Child | None = None) -> None:
    """Wait until `condition()`, and fail after `seconds`, or if `child` ends before."""
    end = monotonic() + seconds
    while not condition():
        output = "" if child is None else f":\n{child.output()[-3000:]}"
        assert child is None or not child.has_ended, f"the process ended before {what}{output}"
        assert monotonic() < end, f"timed out after {seconds:g} s waiting for {what}{output}"
        sleep(0.1)


def call(*command: str, check: bool = True) -> str:
    """Run a program of the system to its end, and return its output.

    Raises:
        AssertionError: It fails; the message contains its output.
    """
    # Programs of the system that are written in Python must not find the project's packages.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**environment, "LC_ALL": "C"}
    )
    assert not (check and done.returncode), f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"
    return done.stdout
