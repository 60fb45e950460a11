"""Threads: order, errors, and a bound on what is under way."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from pipeline.raw_images.parallel import CHUNK_ITEMS, CHUNK_S, in_threads, num_threads


@pytest.mark.parametrize("count", [0, 1, CHUNK_ITEMS, 7 * CHUNK_ITEMS + 3, 2000])
def test_results_come_in_the_order_of_the_items(count: int) -> None:
    items = list(range(count))
    assert list(in_threads(str, items, log=print, doing="told")) == [str(item) for item in items]


def test_L12_only_a_few_chunks_are_under_way() -> None:
    done: list[int] = []
    lock = threading.Lock()

    def work(item: int) -> int:
        with lock:
            done.append(item)
        return item

    results = in_threads(work, range(100_000), log=print, doing="told")
    next(results)
    results.close()
    assert len(done) <= 3 * num_threads() * CHUNK_ITEMS


@pytest.mark.parametrize("threads", [1, 3])
def test_L12_never_more_items_are_under_way_than_is_said(threads: int) -> None:
    """Chunks of the fastest work, whatever their length, end where the bound does."""
    taken: list[int] = []

    class Items(list[int]):
        def __getitem__(self, place: Any) -> Any:
            taken.extend(items := super().__getitem__(place))
            return items

    most = 0
    results = in_threads(str, Items(range(5_000)), log=print, doing="told", threads=threads)
    for given, _ in enumerate(results):
        most = max(most, len(taken) - given)
    assert most <= 3 * threads * CHUNK_ITEMS


def test_items_that_take_long_are_taken_one_at_a_time_so_that_all_threads_have_work_to_the_end() -> None:
    last_two = threading.Barrier(2, timeout=20)
    items = range(2 * 3 * CHUNK_ITEMS + 34)

    def work(item: int) -> None:
        time.sleep(2 * CHUNK_S)
        if item >= len(items) - 2:
            last_two.wait()

    list(in_threads(work, items, log=print, doing="told", threads=2))


def test_what_the_function_raises_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_threads(lambda item: 1 // (item - 500), range(2000), log=print, doing="divided"))


def test_progress_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.reporting.progress.FIRST_LINE_S", 0.001)
    lines: list[str] = []

    def until_told(item: int) -> int:
        while item == 1999 and not lines:
            time.sleep(0.001)
        return item

    list(in_threads(until_told, range(2000), log=lines.append, doing="images read"))
    assert lines[0].startswith("images read: ")
    assert " of 2,000 (" in lines[0]
