"""A progress bar is drawn only on the terminal in which a person runs this job in the foreground."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from pipeline.reporting.terminal import TERMINAL_VARIABLE, find_terminal, open_progress_bar

pytestmark = pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no pseudo-terminals")

FIND = f"""
import os
from pipeline.reporting.terminal import find_terminal
find_terminal()
print(os.environ.get({TERMINAL_VARIABLE!r}, "none"))
"""

FIND_IN_A_CHILD = f"""
import multiprocessing, os
from pipeline.reporting.terminal import find_terminal

def find():
    find_terminal()
    print(os.environ.get({TERMINAL_VARIABLE!r}, "none"))

find_terminal()
child = multiprocessing.get_context("fork").Process(target=find)
child.start()
child.join()
"""
"""A code server and a run of Dagster's UI, which is a multiprocessing child of it."""


def terminal_found_by(
    code: str = FIND, *, background: bool = False, term: str = "xterm", has_input: bool = True
) -> tuple[str, str]:
    """Return the name of a new terminal, and of the terminal found by a process started on it."""
    controller, terminal = os.openpty()
    name = os.ttyname(terminal)
    # The process leads a new session, takes the terminal and is its foreground process.
    take = "import fcntl, os, sys, termios; fcntl.ioctl(2, termios.TIOCSCTTY, 0); "
    run = f"os.execv(sys.executable, [sys.executable, '-c', {code!r}])"
    if background:
        run = f"pid = os.fork(); os.waitpid(pid, 0) if pid else (os.setpgid(0, 0), {run})"
    completed = subprocess.run(
        [sys.executable, "-c", take + run],
        stdin=terminal if has_input else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal,
        env={**os.environ, "TERM": term},
        cwd=Path(__file__).parents[3],
        start_new_session=True,
        check=True,
        timeout=60,
    )
    os.close(controller)
    os.close(terminal)
    return name, completed.stdout.decode().strip()


def test_a_foreground_job_on_a_terminal_finds_it() -> None:
    name, found_name = terminal_found_by()
    assert found_name == name


@pytest.mark.parametrize(
    ("code", "background", "term", "has_input"),
    [
        (FIND_IN_A_CHILD, False, "xterm", True),
        (FIND, True, "xterm", True),
        (FIND, False, "dumb", True),
        (FIND, False, "xterm", False),
    ],
    ids=["a run of the UI", "in the background", "a dumb terminal", "no standard input"],
)
def test_no_terminal_is_found_where_nobody_waits_for_this_job(
    code: str, background: bool, term: str, has_input: bool
) -> None:
    assert terminal_found_by(code, background=background, term=term, has_input=has_input)[1] == "none"


def test_redirected_output_is_not_a_terminal_and_clears_an_inherited_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TERMINAL_VARIABLE, "/dev/null")
    find_terminal()
    assert TERMINAL_VARIABLE not in os.environ
    assert open_progress_bar() is None


def test_there_is_no_bar_on_a_terminal_that_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TERMINAL_VARIABLE, str(tmp_path / "gone"))
    assert open_progress_bar() is None


@pytest.mark.parametrize(
    ("caption", "shown"),
    [
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("\x9b2Jcat", "\\x9b2Jcat"),
        ("a\r\nb\x0bc", "a b c"),
        ("\u202egnp\x7f", "\\u202egnp\\x7f"),
    ],
)
def test_a_bar_names_a_caption_with_escapes(
    monkeypatch: pytest.MonkeyPatch, caption: str, shown: str
) -> None:
    controller, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 200))
    monkeypatch.setenv(TERMINAL_VARIABLE, os.ttyname(terminal))
    bar = open_progress_bar()
    assert bar is not None
    bar.show(1, 3, "captions encoded", f"working on {caption} for 9 s")
    drawn = b""
    # The terminal may deliver what was drawn in several parts.
    while b" for 9 s" not in drawn:
        drawn += os.read(controller, 4_096)
    bar.close()
    os.close(controller)
    os.close(terminal)
    assert f"working on {shown} for 9 s" in drawn.decode()
    assert caption not in drawn.decode()
