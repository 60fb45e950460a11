"""Long work writes a line every 30 s, or draws a bar; short work reports nothing."""

from __future__ import annotations

import os
import select
import termios
import threading

import pytest

from pipeline.reporting.progress import ProgressLines, phase, progress
from pipeline.reporting.terminal import TERMINAL_VARIABLE


class Clock:
    """Time in seconds that the test advances."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Recorded:
    """Progress lines of one process with the second in which each was written."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.start_s = self.clock.now_s
        self.texts: list[str] = []
        self.at_s: list[float] = []
        self.lines = ProgressLines(self._log, clock=self.clock)
        self.lines.memory = lambda: "7.9 GiB of GPU memory"

    def _log(self, text: str) -> None:
        self.texts.append(text)
        self.at_s.append(self.clock.now_s - self.start_s)

    def advance(self, seconds: float) -> None:
        """Let time pass in steps of half a second, each with a tick as of the background thread."""
        for _ in range(round(seconds / 0.5)):
            self.clock.now_s += 0.5
            self.lines.tick()


@pytest.mark.parametrize(
    ("done", "total", "unit", "elapsed_s", "text"),
    [
        (120, 1000, "step", 52.0, "step 120 of 1,000, 2.3 steps/s, 0:52 elapsed, about 6:21 left"),
        (3, 600, "step", 60.0, "step 3 of 600, 20 s per step, 1:00 elapsed, about 3:19:00 left"),
        (1200, 5000, "", 6.0, "1,200 of 5,000, 200/s, 0:06 elapsed, about 0:19 left"),
        (0, 5, "", 5.0, "0 of 5, 0:05 elapsed"),
        (120_000, None, "", 5.0, "120,000, 24,000/s, 0:05 elapsed"),
    ],
)
def test_a_line_gives_count_speed_elapsed_and_remaining_time_and_memory(
    done: int, total: int | None, unit: str, elapsed_s: float, text: str
) -> None:
    recorded = Recorded()
    recorded.lines.count(0, total, "training", unit=unit)
    recorded.clock.now_s += elapsed_s
    recorded.lines.count(done, total, "training", unit=unit)
    recorded.lines.tick()
    assert recorded.texts == [f"training: {text}, 7.9 GiB of GPU memory"]


def test_counted_work_writes_a_line_after_5_s_and_then_every_30_s() -> None:
    recorded = Recorded()
    recorded.lines.count(0, 1000, "images decoded")
    for _ in range(200):
        recorded.lines.count(recorded.lines._counted["images decoded"].done + 1, 1000, "images decoded")
        recorded.advance(0.5)
    assert recorded.at_s == [5.0, 35.0, 65.0, 95.0]


def test_each_slow_phase_of_a_start_is_named_within_5_s() -> None:
    """Three phases of 2, 20 and 50 s, after which the first step is done."""
    recorded = Recorded()
    for name, seconds in [
        ("importing torch", 2.0),
        ("loading the transformer (2/3)", 20.0),
        ("first step", 50.0),
    ]:
        recorded.lines.phase(name)
        recorded.advance(seconds)
    recorded.lines.count(1, 10, "training", unit="step")
    recorded.advance(8.0)
    assert list(zip(recorded.at_s, [text.split(":")[0] for text in recorded.texts], strict=True)) == [
        (5.0, "loading the transformer (2/3)"),
        (24.0, "first step"),
        (54.0, "first step"),
        (74.0, "training"),
    ]
    assert recorded.texts[0] == "loading the transformer (2/3): 0:03 elapsed, 7.9 GiB of GPU memory"


def test_phases_of_less_than_2_s_write_no_lines() -> None:
    recorded = Recorded()
    for step in (10, 20, 30):
        recorded.lines.phase(f"saving the checkpoint of step {step}")
        recorded.advance(1.5)
        recorded.lines.count(step, 30, "training", unit="step")
        recorded.advance(5.0)
    assert [text.split(",")[0] for text in recorded.texts] == ["training: step 10 of 30"]


def test_the_speed_of_a_resumed_run_excludes_earlier_steps() -> None:
    recorded = Recorded()
    recorded.lines.count(600, 1000, "training", unit="step")
    recorded.clock.now_s += 10
    recorded.lines.count(620, 1000, "training", unit="step", note="loss 0.1200")
    recorded.lines.tick()
    assert recorded.texts[0].startswith(
        "training: step 620 of 1,000, 2.0 steps/s, 0:10 elapsed, about 3:10 left, "
    )
    assert recorded.texts[0].endswith(", loss 0.1200")


def test_the_last_line_is_written_once_and_a_phase_does_not_reset_the_count() -> None:
    recorded = Recorded()
    recorded.lines.count(0, 4, "latents encoded")
    recorded.clock.now_s += 1
    recorded.lines.phase("decoding latents for the report")
    recorded.clock.now_s += 1
    recorded.lines.count(4, 4, "latents encoded")
    recorded.lines.finish()
    assert recorded.texts == [], "the work took less than 5 s"
    recorded.lines.finish(always=True)
    recorded.lines.finish(always=True)
    assert recorded.texts == ["latents encoded: 4 of 4, 2.0/s, 0:02 elapsed, 7.9 GiB of GPU memory"]


def test_L16_stalled_work_is_still_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_LINE_S", "LINE_INTERVAL_S"):
        monkeypatch.setattr(f"pipeline.reporting.progress.{name}", 0.001)
    has_two_lines = threading.Event()
    lines: list[str] = []

    def log(text: str) -> None:
        lines.append(text)
        if len(lines) == 2:
            has_two_lines.set()

    with progress(lambda: 7, 9, "images read", log=log):
        assert has_two_lines.wait(20)
    assert lines[0].startswith("images read: 7 of 9, 0:0")
    assert lines[0].endswith(" GiB of memory")


def test_measured_work_names_its_unit_and_its_total_may_grow() -> None:
    recorded = Recorded()
    recorded.lines.count(0, 2000, "downloading a/b", measure="MB")
    recorded.clock.now_s += 20
    recorded.lines.count(1200, 5000, "downloading a/b", measure="MB")
    recorded.lines.tick()
    assert recorded.texts == [
        "downloading a/b: 1,200 of 5,000 MB, 60 MB/s, 0:20 elapsed, about 1:03 left, 7.9 GiB of GPU memory"
    ]


def test_work_that_cannot_be_counted_reports_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.reporting.progress.FIRST_LINE_S", 0.001)
    monkeypatch.setattr("pipeline.reporting.progress.TICK_S", 0.001)
    has_line = threading.Event()
    lines: list[str] = []

    def log(text: str) -> None:
        lines.append(text)
        has_line.set()

    with phase("listing the cache", log=log):
        assert has_line.wait(20)
    assert lines[0].startswith("listing the cache: 0:00 elapsed, ")


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
