"""The study of the caption swap finds planted captions; the complete one is `python -m demo.diagnosing`."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from demo.concept_pictures import write_pictures
from demo.diagnosing import NUM_WRONG, Trial, exchange_captions, report, results_of, trial


def test_captions_are_exchanged_and_the_changed_samples_returned(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    before = {file: file.read_text("utf-8") for file in tmp_path.rglob("*.txt")}
    wrong = exchange_captions(tmp_path, 4, seed=1)
    after = {file: file.read_text("utf-8") for file in before}
    changed = {file for file in before if before[file] != after[file]}
    assert {file.relative_to(tmp_path).with_suffix(".png").as_posix() for file in changed} == wrong
    assert len(wrong) == 4
    assert sorted(before.values()) == sorted(after.values())


def test_the_auc_counts_pairs_in_order() -> None:
    verdicts = ["does not fit", "cannot tell", "fits", "fits"]
    table = pl.DataFrame({"sample_id": [*"abcd"], "score": [1.0, -1.0, -0.5, -2.0], "verdict": verdicts})
    one = Trial(table, {"passes": 36, "samples": 4, "cannot_tell": 1}, frozenset("ab"))
    # a is above c and d, b above d only.
    assert one.auc == 0.75
    assert (one.found, one.epochs) == ({"a"}, 3.0)
    clean = Trial(table, one.report, frozenset())
    result = {"seed": 5, **results_of(one, clean)}
    assert list(report([result]))[-1] == "| 5 | 0.750 | 1 of 2 | 0 | 1 | 1 | 3.0 |"


@pytest.mark.slow
def test_exchanged_captions_have_the_highest_scores_and_clean_ones_raise_no_alarm(tmp_path: Path) -> None:
    trials = {}
    for num_wrong in (0, NUM_WRONG):
        folder = tmp_path / str(num_wrong)
        folder.mkdir()
        trials[num_wrong] = trial(folder, tmp_path / "cache", 0, num_wrong=num_wrong)
    assert trials[0].found == frozenset()
    planted = trials[NUM_WRONG]
    assert planted.auc >= 0.95
    assert planted.found <= planted.wrong
    assert len(planted.found) >= NUM_WRONG - 1
