"""What a training shows about planted defects; the complete study is `python -m demo.defects_trained`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.defects import TOP
from demo.defects_trained import PARTS, report, trained, watched


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


def test_the_report_counts_defects_by_kind_and_compares_trainings_of_a_seed() -> None:
    planted = {"a": "caption", "b": "caption", "c": "shape", "d": "blurred"}
    found = [
        {"seed": seed, "planted": planted, "captions": ["b", "x", "a"], "pictures": ["d"]} for seed in (0, 1)
    ]
    results = [
        {"seed": seed, "part": part, "score": score, "hardest": ["x", "c"], "watched": ["y"]}
        for seed, scores in enumerate(((0.0, 0.5, 0.5), (0.0, 0.75, 0.5)))
        for part, score in zip(PARTS, scores, strict=True)
    ]
    # A seed with one training only has lists, and no row.
    results.append({**results[0], "seed": 2})
    lines = list(report([*found, {**found[0], "seed": 2}], results))
    assert "| diagnosis and checks | 6 of 6 | 0 of 3 | 3 of 3 | 3 |" in lines
    assert "| hardest | 0 of 6 | 3 of 3 | 0 of 3 | 3 |" in lines
    assert "| 1 | 0.75 | 0.50 |" in lines
    assert "| mean | 0.625 | 0.500 |" in lines
    assert lines[-1] == "repaired: 0.125 lower than clean, standard error 0.125"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_training_of_one_seed_lists_six_images_by_each_rule(tmp_path: Path) -> None:
    result = trained(tmp_path, tmp_path / "cache", 0, "planted", [])
    assert {len(set(result[name])) for name in ("hardest", "watched")} == {TOP}
