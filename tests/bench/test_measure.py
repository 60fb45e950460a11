"""Both sides are measured in alternation and paired by round; the first round is discarded."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.__main__ import all_figures
from bench.measure import Figure, Side, Sides, Workplace, measure, side_in_process, timed


def figure_of(calls: list[str], ours: Iterator[float], limit: Iterator[float]) -> Figure:
    def side(name: str, seconds: Iterator[float]) -> Callable[[], float]:
        def run() -> float:
            calls.append(name)
            return next(seconds)

        return run

    @contextmanager
    def opened(place: Workplace) -> Iterator[Sides]:
        yield Sides(10, side("ours", ours), side("limit", limit))
        calls.append("closed")

    return Figure("figure", "images", "ours", "limit", None, opened)


def test_both_sides_alternate_and_the_first_round_is_discarded(tmp_path: Path) -> None:
    calls: list[str] = []
    figure = figure_of(calls, iter([99.0, 2.0, 6.0, 4.0]), iter([99.0, 1.0, 2.0, 4.0]))
    measured = measure(figure, Workplace(tmp_path, full=False), rounds=3)
    assert measured.ours == [2.0, 6.0, 4.0]
    assert measured.ratios == [2.0, 3.0, 1.0]
    assert measured.ratio == 2.0
    pairs = [set(calls[index : index + 2]) for index in range(0, 8, 2)]
    assert pairs == [{"ours", "limit"}] * 4
    assert calls[2] != calls[4], "the first side alternates between rounds"
    assert calls[-1] == "closed"


def test_timed_runs_the_work_and_returns_its_seconds() -> None:
    calls: list[int] = []
    assert timed(lambda: calls.append(1))() >= 0
    assert calls == [1]


@contextmanager
def spin_count(file: Path) -> Iterator[Side]:
    """A side that returns the spin count of its process and its number of calls so far."""
    calls: list[int] = []

    def side() -> float:
        calls.append(1)
        return int(os.environ["GOMP_SPINCOUNT"]) + len(calls)

    yield side
    file.write_text("closed", encoding="utf-8")


def test_a_side_in_its_own_process_has_its_variables_and_stays_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    file = tmp_path / "file"
    with side_in_process(spin_count, file, {"GOMP_SPINCOUNT": "10"}) as side:
        assert (side(), side()) == (11, 12)
        assert "GOMP_SPINCOUNT" not in os.environ
        assert not file.exists()
    assert file.read_text(encoding="utf-8") == "closed"


def test_the_limits_run_with_openmps_defaults() -> None:
    code = "import os, bench.__main__; print('OMP_WAIT_POLICY' in os.environ)"
    plain = {name: each for name, each in os.environ.items() if name != "OMP_WAIT_POLICY"}
    shown = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, check=True)
    assert shown.stdout == b"False\n"


def test_figure_names_are_unique() -> None:
    names = [figure.name for figure in all_figures()]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert len(names) > 5
