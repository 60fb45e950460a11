from __future__ import annotations

from pathlib import Path

from demo.stored_results import add_result, read_results


def test_results_are_read_by_seed_in_any_order_of_their_storage(tmp_path: Path) -> None:
    file = tmp_path / "results" / "study.jsonl"
    assert read_results(file) == []
    for seed in (2, 0, 1):
        add_result(file, {"seed": seed, "score": 0.5})
    assert [each["seed"] for each in read_results(file)] == [0, 1, 2]
