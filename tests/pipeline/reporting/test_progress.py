"""Progress: lines in the log at a growing distance, or a bar, and nothing of work that is over at once."""

from __future__ import annotations

import os
import select
import termios
import threading

import pytest

from pipeline.reporting.progress import line, progress
from pipeline.reporting.terminal import TERMINAL_VARIABLE


@pytest.mark.parametrize(
    ("done", "total", "passed_s", "said"),
    [
        (1200, 5000, 6.0, "images decoded: 1,200 of 5,000 (200 a second, about 19 s left)"),
        (3, 600, 60.0, "images decoded: 3 of 600 (0.05 a second, about 3.3 h left)"),
        (100, 900, 100.0, "images decoded: 100 of 900 (1 a second, about 13 min left)"),
        (0, 5, 5.0, "images decoded: 0 of 5 (0 a second)"),
        (120_000, None, 5.0, "images decoded: 120,000 (24,000 a second)"),
    ],
)
def test_a_line_says_how_much_how_fast_and_how_long_still(
    done: int, total: int | None, passed_s: float, said: str
) -> None:
    assert line(done, total, "images decoded", passed_s) == said


def test_L16_work_that_stands_still_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.reporting.progress.FIRST_LINE_S", 0.001)
    told = threading.Event()
    lines: list[str] = []

    def log(text: str) -> None:
        lines.append(text)
        if len(lines) == 2:
            told.set()

    with progress(lambda: 7, 9, "images read", log=log):
        assert told.wait(20)
    assert lines[0].startswith("images read: 7 of 9 (")


def test_short_work_says_nothing_and_an_error_comes_out_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    with pytest.raises(ZeroDivisionError), progress(lambda: 0, 1, "images read", log=lines.append):
        raise ZeroDivisionError
    assert lines == []
    assert capfd.readouterr() == ("", "")
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no terminals here")
@pytest.mark.parametrize("size", [(0, 0), (0, 110), (40, 110)], ids=str)
def test_on_a_terminal_there_is_a_bar_and_no_line(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    """Of that many lines and columns; a program that makes a terminal may leave its size open."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, size)
    monkeypatch.setenv(TERMINAL_VARIABLE, os.ttyname(theirs))
    monkeypatch.setattr("pipeline.reporting.progress.BAR_AFTER_S", 0.001)
    monkeypatch.setattr("pipeline.reporting.progress.FIRST_LINE_S", 0.001)
    lines: list[str] = []
    with progress(lambda: 30, 40, "images decoded", log=lines.append):
        assert select.select([ours], [], [], 20)[0], "nothing is drawn"
        drawn = os.read(ours, 4096).decode()
    assert "images decoded" in drawn
    assert "30/40" in drawn
    assert lines == []
    os.close(ours)
    os.close(theirs)
