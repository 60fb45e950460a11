"""Which terminal a bar may be drawn on: one on which somebody waits for this very job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.reporting.terminal import TERMINAL_VARIABLE, bar, find_terminal

pytestmark = pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no terminals here")

FIND = f"""
import os, sys
from pipeline.reporting.terminal import find_terminal
find_terminal(sys.argv)
print(os.environ.get({TERMINAL_VARIABLE!r}, "none"))
"""


def found(arguments: list[str], *, background: bool = False, term: str = "xterm") -> tuple[str, str]:
    """The name of a new terminal, and of the one that a process finds which was started on it."""
    ours, theirs = os.openpty()
    name = os.ttyname(theirs)
    # A session of its own, whose terminal this becomes; the foreground is its first process.
    take = "import fcntl, os, sys, termios; fcntl.ioctl(2, termios.TIOCSCTTY, 0); "
    run = f"os.execv(sys.executable, [sys.executable, '-c', {FIND!r}, *{arguments!r}])"
    if background:
        run = f"pid = os.fork(); os.waitpid(pid, 0) if pid else (os.setpgid(0, 0), {run})"
    done = subprocess.run(
        [sys.executable, "-c", take + run],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": term},
        cwd=Path(__file__).parents[3],
        start_new_session=True,
        check=True,
        timeout=60,
    )
    os.close(ours)
    os.close(theirs)
    return name, done.stdout.decode().strip()


def test_a_job_executed_on_a_terminal_has_it() -> None:
    name, seen = found(["job", "execute", "-m", "assets.definitions"])
    assert seen == name


@pytest.mark.parametrize(
    ("arguments", "background", "term"),
    [
        (["api", "execute_run"], False, "xterm"),
        (["job", "execute"], True, "xterm"),
        (["job", "execute"], False, "dumb"),
    ],
    ids=["a run of the UI", "in the background", "a terminal that cannot go back"],
)
def test_there_is_none_where_nobody_waits_for_this_job(
    arguments: list[str], background: bool, term: str
) -> None:
    assert found(arguments, background=background, term=term)[1] == "none"


def test_redirected_output_is_no_terminal_and_an_inherited_name_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TERMINAL_VARIABLE, "/dev/null")
    find_terminal(["dagster", "job", "execute"])
    assert TERMINAL_VARIABLE not in os.environ
    assert bar() is None


def test_a_terminal_that_has_gone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TERMINAL_VARIABLE, str(tmp_path / "gone"))
    assert bar() is None
