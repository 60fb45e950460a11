"""Threads keep the order of results, pass errors on, and hold a bounded number of items."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from pipeline.processes.launch import num_cores
from pipeline.raw_images.parallel import ITEMS_PER_THREAD, in_threads


@pytest.mark.parametrize("count", [0, 1, ITEMS_PER_THREAD, 7 * ITEMS_PER_THREAD + 3, 2000])
def test_results_come_in_the_order_of_the_items(count: int) -> None:
    items = list(range(count))
    assert list(in_threads(str, items, log=print, doing="items done")) == [str(item) for item in items]


def test_L12_a_caller_that_stops_early_has_started_only_a_few_items() -> None:
    started: list[int] = []
    lock = threading.Lock()

    def work(item: int) -> int:
        with lock:
            started.append(item)
        return item

    results = in_threads(work, range(100_000), log=print, doing="items done")
    next(results)
    results.close()
    assert len(started) <= num_cores() * ITEMS_PER_THREAD


@pytest.mark.parametrize("threads", [1, 3])
def test_L12_the_number_of_items_in_progress_is_bounded(threads: int) -> None:
    started: list[int] = []

    class Items(list[int]):
        def __iter__(self) -> Iterator[int]:
            for item in super().__iter__():
                started.append(item)
                yield item

    max_in_progress = 0
    results = in_threads(str, Items(range(5_000)), log=print, doing="items done", threads=threads)
    for num_yielded, _ in enumerate(results):
        max_in_progress = max(max_in_progress, len(started) - num_yielded)
    assert max_in_progress <= threads * ITEMS_PER_THREAD + 1


def test_all_threads_have_work_until_the_end_when_items_take_long() -> None:
    last_two = threading.Barrier(2, timeout=20)
    items = range(2 * ITEMS_PER_THREAD + 34)

    def work(item: int) -> None:
        time.sleep(0.008)
        if item >= len(items) - 2:
            last_two.wait()

    list(in_threads(work, items, log=print, doing="items done", threads=2))


def test_an_exception_of_the_function_is_raised_to_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        list(in_threads(lambda item: 1 // (item - 500), range(2000), log=print, doing="divided"))


def test_progress_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.reporting.progress.FIRST_LINE_S", 0.001)
    lines: list[str] = []

    def wait_for_progress(item: int) -> int:
        while item == 1999 and not lines:
            time.sleep(0.001)
        return item

    list(in_threads(wait_for_progress, range(2000), log=lines.append, doing="images read"))
    assert lines[0].startswith("images read: ")
    assert " of 2,000, " in lines[0]
