from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from demo.stored_results import Result, add_result, read_results, run_study


def test_results_are_read_by_seed_in_any_order_of_their_storage(tmp_path: Path) -> None:
    file = tmp_path / "results" / "study.jsonl"
    assert read_results(file) == []
    for seed in (2, 0, 1):
        add_result(file, {"seed": seed, "score": 0.5})
    assert [each["seed"] for each in read_results(file)] == [0, 1, 2]


def test_a_study_adds_the_seeds_that_are_missing_and_reports_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "results" / "study.jsonl", tmp_path / "work"
    add_result(file, {"seed": 1, "score": 0.5})

    def trial(own: Path, cache: Path, seed: int) -> Result:
        assert not [*own.iterdir()]
        assert cache == folder / "cache"
        return {"score": float(seed)}

    monkeypatch.setattr(sys, "argv", ["study", str(folder), "--seeds", "3"])

    def report(results: Sequence[Result]) -> list[str]:
        return [f"{each['seed']}: {each['score']}" for each in results]

    run_study("A study.", file, trial, report)
    assert capsys.readouterr().out.splitlines() == ["0: 0.0", "1: 0.5", "2: 2.0"]
    assert len(read_results(file)) == 3
    assert not [*folder.iterdir()]
