"""Stored bench runs, their table, and the comparison of two runs."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from bench.measure import Figure, Line, Measure, Measured, Sides, Workplace
from bench.results import as_json, compare, load, save, table


def unopened(place: Workplace) -> AbstractContextManager[Sides]:
    raise AssertionError("results must not open a figure again")


def run(**ratios: list[float]) -> dict[str, object]:
    measured = [
        Measured(Figure(name, "images", "ours", "limit", 2.0, unopened), 100, values, [1.0] * len(values))
        for name, values in ratios.items()
    ]
    return as_json(measured, full=False)


def test_a_stored_run_is_read_back_unchanged(tmp_path: Path) -> None:
    stored = run(scan=[1.0, 1.5, 1.2])
    save(stored, tmp_path / "deep" / "run.json")
    assert load(tmp_path / "deep" / "run.json") == stored


def test_the_table_shows_figure_units_ratio_and_spread() -> None:
    line = table(run(scan=[1.0, 1.5, 1.2])).splitlines()[1]
    assert line.split() == ["scan", "100", "12", "ms", "10", "ms", "1.20", "1.00-1.50", "2.00"]


def test_bench_commit_names_the_commit_of_a_copy_without_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "abc1234")
    assert run(scan=[1.0])["commit"] == "abc1234"


def test_memory_and_shares_are_totals_and_not_per_unit() -> None:
    def line(measure: Measure, value: float) -> list[str]:
        figure = Line("it", "peak", "ours", "limit", None, measure=measure)
        return (
            table(as_json([Measured(figure, 100, [value], [2 * value])], full=False)).splitlines()[1].split()
        )

    assert line("bytes", 2**30) == ["it", "100", "1", "GiB", "2", "GiB", "0.50", "0.50-0.50"]
    assert line("share", 0.125) == ["it", "100", "12.5%", "25.0%", "0.50", "0.50-0.50"]


def test_slower_means_ten_percent_worse_and_above_every_earlier_ratio() -> None:
    before = run(worse=[1.0, 1.0, 1.05], noisy=[1.0, 1.0, 3.0], better=[2.0, 2.0, 2.0], gone=[1.0])
    after = run(worse=[1.2, 1.2, 1.2], noisy=[1.5, 1.5, 1.5], better=[1.0, 1.0, 1.0], new=[1.0])
    assert {change.name: change.slower for change in compare(before, after)} == {
        "worse": True,
        "noisy": False,
        "better": False,
    }
