"""The measurement of what a LoRA has learned, on a pipeline that draws the demo's own pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from demo.learned import SCORES_FILE, SHEET_FILE, Learned, measure
from tests.demo.drawing_pipeline import DrawingPipeline


def test_a_lora_that_teaches_the_concept_is_measured_and_shown(tmp_path: Path) -> None:
    learned = measure(DrawingPipeline(teaches=True), Path("lora"), tmp_path)
    assert learned == Learned(0.0, 1.0, 1.0, 1.0)
    assert learned.missed_targets() == []
    assert json.loads((tmp_path / SCORES_FILE).read_text())["concept_after"] == 1.0
    with Image.open(tmp_path / SHEET_FILE) as sheet:
        assert sheet.width > 1000


def test_a_lora_that_teaches_nothing_misses_the_target(tmp_path: Path) -> None:
    learned = measure(DrawingPipeline(teaches=False), Path("lora"), tmp_path)
    assert [sentence.split(",")[0] for sentence in learned.missed_targets()] == ["the concept scores 0.00"]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (Learned(0.2, 1.0, 1.0, 1.0), "the base model draws the concept: 0.20"),
        (Learned(0.0, 1.0, 0.9, 0.7), "known shapes lost 0.20, more than 0.1"),
    ],
)
def test_each_missed_target_is_named(scores: Learned, expected: str) -> None:
    assert scores.missed_targets() == [expected]
