"""Lines that commands print without a terminal; test_run_command has the transcripts of a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from demo.experiments import copy_demo
from pipeline.recipe import load_recipe
from pipeline.recipe.check_specs import SPECS
from tests.e2e.daemon import make_home

COMMAND = [sys.executable, "-c", "from pipeline.cli.main import main; main()", "run"]

MAX_DEMO_LINES = 40
NORMAL_DEMO_S = 90.0
SECONDS_PER_LINE = 15.0
"""A log has a line for work of some seconds, so a busy machine prints more of them: one in this time."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "dagster home")


def nonempty_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def demo_environment(folder: Path, home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "LATENTLINE_CONFIGS": str(folder / "configs"),
        "DO_NOT_TRACK": "1",
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_prints_less_than_40_lines_without_a_terminal(tmp_path: Path, home: Path) -> None:
    steps = load_recipe(copy_demo(tmp_path)).training.steps
    started_s = time.monotonic()
    completed = subprocess.run(
        [*COMMAND, "demo"],
        env=demo_environment(tmp_path, home),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    messages, summary = nonempty_lines(completed.stderr), nonempty_lines(completed.stdout)
    slow_s = max(0.0, time.monotonic() - started_s - NORMAL_DEMO_S)
    limit = MAX_DEMO_LINES + slow_s / SECONDS_PER_LINE
    assert len(messages) + len(summary) < limit, completed.stderr + completed.stdout

    # What a reader of the log needs is still there.
    start, *messages = messages
    assert start == "starting demo"
    assert {line.split()[1] for line in messages} == set(SPECS)
    assert "48 found, 48 ignored (48 captions), 0 rejected, 48 kept" in "\n".join(messages)
    assert "1 bucket (height x width), samples: 64x64 48" in "\n".join(messages)
    last_step = next((line for line in messages if f"training: step {steps} of {steps}, " in line), messages)
    assert "loss " in last_step
    assert f"  LoRA      {tmp_path / 'out' / 'lora'}" in summary


@pytest.mark.slow
def test_a_small_job_without_a_terminal_prints_the_messages_of_its_stages_in_less_than_40_lines(
    cached: Any, home: Path
) -> None:
    completed = cached.run([*COMMAND, "small", "--cache-only"], DAGSTER_HOME=str(home))
    assert completed.returncode == 0, completed.stderr
    output = completed.stderr + completed.stdout
    assert len(nonempty_lines(output)) < MAX_DEMO_LINES, output
    assert "  raw_images         5 image files" in completed.stderr
    assert "5 found, 5 ignored (5 captions), 0 rejected, 5 kept" in completed.stderr
    assert completed.stdout.startswith("\nsmall_cache: done after ")
    assert "\x1b" not in output, "a progress bar was drawn"
    assert "DEBUG" not in output
