"""Long work writes lines to the log at growing intervals, or draws a bar; short work reports nothing."""

from __future__ import annotations

import os
import select
import termios
import threading

import pytest

from pipeline.reporting.progress import line, progress
from pipeline.reporting.terminal import TERMINAL_VARIABLE


@pytest.mark.parametrize(
    ("done", "total", "elapsed_s", "text"),
    [
        (1200, 5000, 6.0, "images decoded: 1,200 of 5,000 (200 per second, about 19 s left)"),
        (3, 600, 60.0, "images decoded: 3 of 600 (0.05 per second, about 3.3 h left)"),
        (100, 900, 100.0, "images decoded: 100 of 900 (1 per second, about 13 min left)"),
        (0, 5, 5.0, "images decoded: 0 of 5 (0 per second)"),
        (120_000, None, 5.0, "images decoded: 120,000 (24,000 per second)"),
    ],
)
def test_a_line_gives_the_count_the_rate_and_the_remaining_time(
    done: int, total: int | None, elapsed_s: float, text: str
) -> None:
    assert line(done, total, "images decoded", elapsed_s) == text


def test_L16_stalled_work_is_still_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.reporting.progress.FIRST_LINE_S", 0.001)
    has_two_lines = threading.Event()
    lines: list[str] = []

    def log(text: str) -> None:
        lines.append(text)
        if len(lines) == 2:
            has_two_lines.set()

    with progress(lambda: 7, 9, "images read", log=log):
        assert has_two_lines.wait(20)
    assert lines[0].startswith("images read: 7 of 9 (")


def test_short_work_reports_nothing_and_errors_pass_through(capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    with pytest.raises(ZeroDivisionError), progress(lambda: 0, 1, "images read", log=lines.append):
        raise ZeroDivisionError
    assert lines == []
    assert capfd.readouterr() == ("", "")
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no pseudo-terminals")
@pytest.mark.parametrize("size", [(0, 0), (0, 110), (40, 110)], ids=str)
def test_on_a_terminal_a_bar_is_drawn_instead_of_lines(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    """The size is (lines, columns); a pseudo-terminal may report 0 for either."""
    controller, terminal = os.openpty()
    termios.tcsetwinsize(terminal, size)
    monkeypatch.setenv(TERMINAL_VARIABLE, os.ttyname(terminal))
    monkeypatch.setattr("pipeline.reporting.progress.BAR_AFTER_S", 0.001)
    monkeypatch.setattr("pipeline.reporting.progress.FIRST_LINE_S", 0.001)
    lines: list[str] = []
    with progress(lambda: 30, 40, "images decoded", log=lines.append):
        assert select.select([controller], [], [], 20)[0], "nothing is drawn"
        output = os.read(controller, 4096).decode()
    assert "images decoded" in output
    assert "30/40" in output
    assert lines == []
    os.close(controller)
    os.close(terminal)
