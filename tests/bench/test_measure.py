"""Both sides are measured in alternation and paired by round; the first round is discarded."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.__main__ import all_figures
from bench.measure import Figure, Sides, Workplace, measure, timed


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


def test_figure_names_are_unique() -> None:
    names = [figure.name for figure in all_figures()]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert len(names) > 5
