"""A launched process for a command in a terminal or in a scheduler's job; its output is shown at once."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pipeline.processes.launch import OutputFile
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
    output = OutputFile(output_file)
    with stop_signals() as received, output_file.open("wb") as file:
        # A session of its own: Ctrl-C at a terminal reaches this process only, which then stops all others.
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        tree = ProcessTree(process.pid)
        while process.poll() is None and not received:
            _show(output.new_text(), show)
            tree.members()  # finds descendants before their parents can die
            time.sleep(POLL_S)

        # Also after the command has ended by itself, because its descendants may outlive it.
        tree.stop(grace_s=grace_s)
        status = process.wait()
        _show(output.new_text(final=True), show)
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


def _show(text: str, show: Callable[[str], None]) -> None:
    for line in text.splitlines():
        show(line)
