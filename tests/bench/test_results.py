"""What a bench run is kept as, and when a later one counts as slower."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from bench.measure import Figure, Line, Measure, Measured, Sides, Workplace
from bench.results import as_json, compare, load, save, table


def unopened(place: Workplace) -> AbstractContextManager[Sides]:
    raise AssertionError("only what was measured is looked at")


def run(**ratios: list[float]) -> dict[str, object]:
    measured = [
        Measured(Figure(name, "images", "ours", "limit", 2.0, unopened), 100, values, [1.0] * len(values))
        for name, values in ratios.items()
    ]
    return as_json(measured, full=False)


def test_a_run_survives_its_file(tmp_path: Path) -> None:
    kept = run(scan=[1.0, 1.5, 1.2])
    save(kept, tmp_path / "deep" / "run.json")
    assert load(tmp_path / "deep" / "run.json") == kept


def test_the_table_names_figure_units_ratio_and_spread() -> None:
    line = table(run(scan=[1.0, 1.5, 1.2])).splitlines()[1]
    assert line.split() == ["scan", "100", "12", "ms", "10", "ms", "1.20", "1.00-1.50", "2.00"]


def test_a_copy_without_history_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "abc1234")
    assert run(scan=[1.0])["commit"] == "abc1234"


def test_memory_and_shares_are_shown_whole_and_not_by_unit() -> None:
    def line(measure: Measure, value: float) -> list[str]:
        of = Line("it", "peak", "ours", "limit", None, measure=measure)
        return table(as_json([Measured(of, 100, [value], [2 * value])], full=False)).splitlines()[1].split()

    assert line("bytes", 2**30) == ["it", "100", "1", "GiB", "2", "GiB", "0.50", "0.50-0.50"]
    assert line("share", 0.125) == ["it", "100", "12.5%", "25.0%", "0.50", "0.50-0.50"]


def test_slower_is_worse_than_a_tenth_and_above_all_that_was_seen_before() -> None:
    before = run(worse=[1.0, 1.0, 1.05], noisy=[1.0, 1.0, 3.0], better=[2.0, 2.0, 2.0], gone=[1.0])
    after = run(worse=[1.2, 1.2, 1.2], noisy=[1.5, 1.5, 1.5], better=[1.0, 1.0, 1.0], new=[1.0])
    assert {change.name: change.slower for change in compare(before, after)} == {
        "worse": True,
        "noisy": False,
        "better": False,
    }
