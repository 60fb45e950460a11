"""A command on a pseudo-terminal of its own session, as a person sees it."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ON_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Gives the command the terminal on standard input as its controlling terminal, which Ctrl-C needs."""

CTRL_C = b"\x03"
_LINE_STARTS = re.compile(r"\r|\x1b\[K")


class Transcript(NamedTuple):
    """Result of a command.

    Attributes:
        status: Exit status.
        lines: Lines that remain on the screen, in order, without empty ones; redrawn lines as they were last.
        raw: Everything that was written to the terminal.
    """

    status: int
    lines: list[str]
    raw: str

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def run_on_terminal(
    command: list[str],
    *,
    environment: dict[str, str],
    cwd: Path,
    press_ctrl_c: Callable[[], bool] = lambda: False,
    close: Callable[[], bool] = lambda: False,
    timeout_s: float = 280.0,
) -> Transcript:
    """Run a command to its end.

    Ctrl-C is pressed once when `press_ctrl_c` returns True, and the terminal is closed when `close` does.
    """
    controller, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, *command],
        # Without colours, which tests/pipeline/reporting/test_colours.py has, lines are compared as text.
        env={**environment, "TERM": "xterm", "NO_COLOR": "1"},
        cwd=cwd,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    output = bytearray()
    pressed = False
    end_s = time.monotonic() + timeout_s
    try:
        while process.poll() is None or select.select([controller], [], [], 0)[0]:
            assert time.monotonic() < end_s, bytes(output[-2000:])
            if not pressed and press_ctrl_c():
                os.write(controller, CTRL_C)
                pressed = True
            if close():
                os.close(controller)
                process.wait(timeout=end_s - time.monotonic())
                break
            if select.select([controller], [], [], 0.1)[0]:
                output += os.read(controller, 65536)
    except OSError:  # Linux reports the end of the last writer as an I/O error
        process.wait(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        with suppress(OSError):  # it is closed already
            os.close(controller)
    raw = output.decode("utf-8", errors="replace").replace("\r\n", "\n")
    shown = [_LINE_STARTS.split(line)[-1] for line in raw.split("\n")]
    return Transcript(process.wait(), [line for line in shown if line.strip()], raw)
