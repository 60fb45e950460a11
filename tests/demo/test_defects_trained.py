"""What a training shows about planted defects; the complete study is `python -m demo.defects_trained`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.defects import TOP
from demo.defects_trained import report, trained, watched


def write_losses(file: Path, losses: dict[str, list[float]]) -> list[str]:
    """Write a step for each loss, with all images at one noise level, and return the images."""
    names = list(losses)
    lines = [
        {"step": step, "samples": [*range(len(names))], "timesteps": [500.0] * len(names), "losses": row}
        for step, row in enumerate(zip(*losses.values(), strict=True))
    ]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return names


def test_an_image_is_watched_if_its_loss_stays_high_and_does_not_fall(tmp_path: Path) -> None:
    stays, falls, low = [3.0] * 40, [8.0 - step / 10 for step in range(40)], [1.0] * 40
    file = tmp_path / "sample_losses.jsonl"
    names = write_losses(file, {"low": low, "falls": falls, "stays": stays})
    assert watched(file, 40, names)[0] == "stays"
    assert "falls" not in watched(file, 40, names)


def test_the_report_counts_defects_by_kind() -> None:
    planted = {"a": "caption", "b": "caption", "c": "shape", "d": "blurred"}
    found = [
        {"seed": seed, "planted": planted, "captions": ["b", "x", "a"], "pictures": ["d"]}
        for seed in (0, 1, 2)
    ]
    # The third seed has no training yet.
    results = [{"seed": seed, "hardest": ["x", "c"], "watched": ["y"]} for seed in (0, 1)]
    lines = list(report(found, results))
    assert "| diagnosis and checks | 4 of 4 | 0 of 2 | 2 of 2 | 2 |" in lines
    assert "| hardest | 0 of 4 | 2 of 2 | 0 of 2 | 2 |" in lines


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_training_of_one_seed_lists_six_images_by_each_rule(tmp_path: Path) -> None:
    result = trained(tmp_path, tmp_path / "cache", 0)
    assert {len(set(result[name])) for name in ("hardest", "watched")} == {TOP}
