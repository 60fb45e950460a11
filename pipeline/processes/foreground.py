"""A launched process for a command in a terminal or in a scheduler's job; its output is shown at once."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pipeline.processes.tree import ProcessTree

POLL_S = 0.1

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal or a scheduler sends to stop a command."""


def run_in_foreground(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output_file: Path,
    grace_s: float,
    show: Callable[[str], None],
) -> tuple[int, signal.Signals | None]:
    """Run a command until it ends; a stop signal to this process stops the command first.

    Args:
        command: Program and arguments.
        environment: Environment of the command.
        output_file: New file for what the command and its processes print.
        grace_s: Seconds between a stop signal and the kill of the remaining processes.
        show: Receives each line that they print.

    Returns:
        The exit status, or minus the number of the signal that ended the command; and the stop signal that
        this process received, or None.
    """
    with stop_signals() as received, output_file.open("wb") as output:
        # A session of its own: Ctrl-C at a terminal reaches this process only, which then stops all others.
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        tree = ProcessTree(process.pid)
        num_shown_bytes = 0
        while process.poll() is None and not received:
            num_shown_bytes = _show_new_lines(output_file, num_shown_bytes, show)
            tree.members()  # finds descendants before their parents can die
            time.sleep(POLL_S)

        tree.stop(grace_s=grace_s)
        status = process.wait()
        _show_new_lines(output_file, num_shown_bytes, show, final=True)
    return status, received[0] if received else None


@contextmanager
def stop_signals() -> Generator[list[signal.Signals]]:
    """Collect stop signals within the context, in the main thread only."""
    received: list[signal.Signals] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    previous = {number: signal.signal(number, remember) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _show_new_lines(
    file: Path, num_shown_bytes: int, show: Callable[[str], None], *, final: bool = False
) -> int:
    """Show the lines after the first `num_shown_bytes`, and return the number of bytes shown.

    Only complete lines are shown, unless `final`: a process that was killed may not have ended its last one.
    """
    with file.open("rb") as output:
        output.seek(num_shown_bytes)
        new = output.read()
    shown = new if final else new[: new.rfind(b"\n") + 1]
    for line in shown.decode("utf-8", errors="replace").splitlines():
        show(line)
    return num_shown_bytes + len(shown)
