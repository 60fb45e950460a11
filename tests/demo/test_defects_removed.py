"""What removing the found images changes; the complete study is `python -m demo.defects_removed`."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.defects_removed import report, trial


def test_the_report_has_the_scores_of_each_seed_and_their_mean_differences() -> None:
    planted = {"a": "caption", "b": "caption", "c": "shape", "d": "blurred"}
    results = [
        {
            "seed": seed,
            "planted": planted,
            "captions": ["b", "x", "a"],
            "pictures": ["d"],
            "scores": {"clean": 0.75, "planted": 0.5, "repaired": repaired},
        }
        for seed, repaired in enumerate((0.75, 0.5))
    ]
    lines = list(report(results))
    assert "| 1 | 3 of 4 | 1 | 0.750 | 0.500 | 0.500 |" in lines
    assert "| mean | | | 0.750 | 0.500 | 0.625 |" in lines
    assert lines[-2:] == [
        "planted: 0.250 lower than clean, standard error 0.000",
        "repaired: 0.125 lower than clean, standard error 0.125",
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_concept_is_learned_with_the_defects_and_without_the_found_images(tmp_path: Path) -> None:
    result = trial(tmp_path, tmp_path / "cache", 0)
    assert min(result["scores"].values()) > 0.5
    assert result["scores"]["repaired"] > result["scores"]["clean"] - 0.1
