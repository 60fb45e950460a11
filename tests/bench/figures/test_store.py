"""The read orders of the store figures, and the detection of a slower store."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import all_figures
from bench.figures.store import plan_order, random_order
from bench.measure import Workplace, measure
from bench.results import as_json, compare
from pipeline.cache.worker import tensors

READS = ("store read random", "store read plan")


def test_both_orders_read_each_entry_once_and_differ_from_the_write_encoding() -> None:
    for order in (random_order(100), plan_order(100)):
        assert sorted(order) == list(range(100))
        assert order != list(range(100))


def test_each_batch_of_the_plan_order_comes_from_one_bucket() -> None:
    order = plan_order(12 * 8)
    batches = [order[start : start + 4] for start in range(0, len(order), 4)]
    assert [batch for batch in batches if len({index % 12 for index in batch}) != 1] == []


@pytest.mark.slow
def test_a_delay_of_two_milliseconds_per_entry_counts_as_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run_of(tmp_path / "before")
    read_torch: Callable[..., Any] = tensors.read_torch

    def slow_read(*arguments: Any) -> Any:
        time.sleep(0.002)
        return read_torch(*arguments)

    monkeypatch.setattr(tensors, "read_torch", slow_read)
    slowed = compare(before, run_of(tmp_path / "after"))
    assert {change.name: change.slower for change in slowed} == dict.fromkeys(READS, True)


def run_of(folder: Path) -> dict[str, Any]:
    figures = [figure for figure in all_figures() if figure.name in READS]
    places = [folder / figure.name for figure in figures]
    measured = [
        measure(figure, Workplace(place, full=False), rounds=3)
        for figure, place in zip(figures, places, strict=True)
    ]
    return as_json(measured, full=False)
