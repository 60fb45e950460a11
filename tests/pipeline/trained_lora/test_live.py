"""The live state of a run, from files as the worker writes them and a clock that the test advances."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from pipeline.trained_lora.live import LiveRun, LiveState
from pipeline.trained_lora.previews import PROMPT_KEY, preview_file

PROMPTS = ("a cat", "a dog")


class Run:
    """A run's folder as its worker leaves it, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 100.0
        (folder / "logs").mkdir()
        (folder / "samples").mkdir()
        job = {
            "recipe": {"training": {"steps": 100}},
            "prompts": [{"caption": caption} for caption in PROMPTS],
        }
        (folder / "order.json").write_text(json.dumps(job), encoding="utf-8")

    def follow(self) -> LiveRun:
        return LiveRun(self.folder / "order.json", lambda: self.now_s)

    def steps(self, first: int, last: int, **values: Any) -> None:
        line = {"samples": 4, "learning_rate": 1e-4, "seconds": 0.5, "memory_bytes": 2**31, **values}
        with (self.folder / "logs" / "metrics.jsonl").open("a", encoding="utf-8") as file:
            for step in range(first, last + 1):
                file.write(json.dumps({"step": step, "loss": step / 10, **line}) + "\n")

    def checkpoint(self, step: int) -> None:
        folder = self.folder / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "COMPLETE").touch()

    def preview(self, step: int, number: int) -> None:
        file = preview_file(self.folder / "samples", step, number)
        text = PngInfo()
        text.add_text(PROMPT_KEY, PROMPTS[number])
        Image.new("RGB", (64, 64), "green").save(file, pnginfo=text)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def states(run: Run, live: LiveRun, seconds: int) -> list[LiveState]:
    """Poll once per second."""
    found: list[LiveState] = []
    for _ in range(seconds):
        run.now_s += 1
        state = live.poll()
        found += [] if state is None else [state]
    return found


def test_the_first_step_is_reported_at_once_and_later_ones_every_30_s(run: Run) -> None:
    live = run.follow()
    assert states(run, live, 5) == []
    run.steps(0, 0)
    reported: list[int] = []
    for step in range(1, 91):
        run.steps(step, step)
        reported += [state.step for state in states(run, live, 1)]
    assert reported == [2, 32, 62]


def test_numbers_are_means_over_the_steps_since_the_last_state(run: Run) -> None:
    live = run.follow()
    run.steps(0, 0)
    states(run, live, 1)
    run.steps(1, 4)
    (state,) = states(run, live, 30)
    assert state.numbers() == {
        "step": 5,
        "steps": 100,
        "loss": pytest.approx(0.25),
        "learning_rate": 1e-4,
        "steps_per_second": 2.0,
        "samples_per_second": 8.0,
        "memory_gib": 2.0,
    }


def test_checkpoints_and_complete_previews_are_reported_earlier_but_at_most_every_5_s(run: Run) -> None:
    live = run.follow()
    run.preview(0, 0)
    assert states(run, live, 1) == [], "the second prompt is not drawn yet"
    run.preview(0, 1)
    (before,) = states(run, live, 2)
    assert (before.step, [preview.heading for preview in before.previews]) == (0, [*PROMPTS])
    assert before.picture().startswith(b"\xff\xd8")

    run.steps(0, 9)
    run.checkpoint(10)
    (state,) = states(run, live, 5)
    assert (state.checkpoint, state.numbers()["checkpoint"], state.previews) == (10, 10, [])
    assert state.picture() == b""
    run.checkpoint(12)
    assert states(run, live, 1) == []
    assert [state.checkpoint for state in states(run, live, 10)] == [12]


def test_a_resumed_run_reports_only_what_is_new(run: Run) -> None:
    run.steps(0, 9)
    run.checkpoint(10)
    run.preview(10, 0)
    run.preview(10, 1)
    with (run.folder / "logs" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 10, "lo')
    live = run.follow()
    assert states(run, live, 40) == []

    with (run.folder / "logs" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n")
    run.steps(10, 11)
    (state,) = states(run, live, 2)
    assert (state.step, len(state.metrics), state.checkpoint) == (12, 2, None)


def test_after_the_end_the_last_steps_are_reported_once(run: Run) -> None:
    live = run.follow()
    run.steps(0, 0)
    states(run, live, 1)
    run.steps(1, 2)
    state = live.poll(final=True)
    assert state is not None
    assert state.step == 3
    assert live.poll(final=True) is None
