"""Reports and errors of entry modules without Dagster; tests/resources/test_launcher.py has those with it."""

from __future__ import annotations

import errno
import json
import re
import time
from pathlib import Path

import pytest

import pipeline.processes.pipes
from pipeline.errors import TrainingError
from pipeline.processes.pipes import Reporter, rank, reporter
from pipeline.reporting.terminal import ProgressBar


@pytest.fixture(autouse=True)
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the test process alive when its parent, a shell, ends."""
    monkeypatch.setattr(pipeline.processes.pipes, "end_with_parent", lambda: None)


def test_without_dagster_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with reporter() as report:
        report.info("3 images")
    assert capsys.readouterr() == ("", "3 images\n")


def test_O09_fast_progress_writes_only_its_last_line() -> None:
    lines: list[str] = []
    report = Reporter(lines.append)
    with report.lines.in_background():
        for done in range(1, 1001):
            report.progress(done, 1000, "images encoded")
    assert [line.split(", ")[0] for line in lines] == ["images encoded: 1,000 of 1,000"]


def test_with_a_bar_only_the_end_of_the_progress_is_logged(tmp_path: Path) -> None:
    lines: list[str] = []
    terminal = tmp_path / "terminal"
    report = Reporter(lines.append, ProgressBar(terminal.open("w", encoding="utf-8")))
    report.phase("loading the UNet (2/6)")
    report.lines.tick()
    for done in range(1, 41):
        report.progress(done, 40, "training", unit="step", note="loss 0.1234")
        time.sleep(0.01)
        report.lines.tick()
    report.close()

    assert [line.split(",")[0] for line in lines] == ["training: step 40 of 40"]
    drawn = terminal.read_text(encoding="utf-8")
    assert "loading the UNet (2/6): 00:0" in drawn
    assert re.search(r"training: .*\d+/40 .*loss 0\.1234", drawn)


def test_an_error_ends_the_process_without_a_traceback_and_is_written_for_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LATENTLINE_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as exit_info, reporter():
        raise TrainingError("loss is NaN", where="step 3", fix="lower the learning rate")
    assert exit_info.value.code == 1
    assert capsys.readouterr().err == (
        "TrainingError: loss is NaN\n  where: step 3\n  fix:   lower the learning rate\n"
    )
    parts = json.loads((tmp_path / "error.json").read_text("utf-8"))
    assert parts["kind"] == "TrainingError"
    assert parts["where"] == "step 3"


def test_a_full_disk_is_written_for_the_launcher_after_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LATENTLINE_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as exit_info, reporter():
        raise OSError(errno.ENOSPC, "No space left on device", "/out/step-00000002")
    assert exit_info.value.code == 1
    assert "Traceback" in capsys.readouterr().err
    parts = json.loads((tmp_path / "error.json").read_text("utf-8"))
    assert (parts["kind"], parts["what"]) == ("FileAccessError", "the disk is full (ENOSPC)")
    assert parts["where"] == "/out/step-00000002"


def test_the_exit_status_of_the_body_is_kept() -> None:
    with pytest.raises(SystemExit) as exit_info, reporter():
        raise SystemExit(143)
    assert exit_info.value.code == 143


def test_the_rank_is_set_by_the_launch_and_0_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert rank() == 0
    monkeypatch.setenv("RANK", "3")
    assert rank() == 3
