from __future__ import annotations

import threading
import time

import pytest

from pipeline.encoding.prefetch import Behind, StalledError, ahead


def test_results_come_in_the_order_of_the_items_even_if_some_take_longer() -> None:
    def work(item: int) -> int:
        time.sleep(0.02 if item % 3 == 0 else 0)
        return item * item

    results = [(item, future.result()) for item, future in ahead(range(20), work, threads=4, depth=6)]
    assert results == [(item, item * item) for item in range(20)]


def test_L12_at_most_depth_items_are_in_memory() -> None:
    """At most five of a million items are started but not yet consumed."""
    started = 0
    lock = threading.Lock()

    def work(item: int) -> int:
        nonlocal started
        with lock:
            started += 1
        return item

    results = ahead(iter(range(1_000_000)), work, threads=3, depth=5)
    for num_consumed, (_, future) in enumerate(results, start=1):
        assert started - num_consumed <= 5
        future.result()
        if num_consumed == 500:
            break
    results.close()
    assert started <= 506


def test_threads_that_work_in_turns_rest_while_the_caller_works() -> None:
    started: list[int] = []

    def work(item: int) -> int:
        started.append(item)
        return item

    taken: list[int] = []
    for _, future in ahead(range(10), work, threads=3, depth=4, in_turns=True):
        turn = len(taken) // 4
        assert sorted(started) == list(range(min(10, 4 * (turn + 1))))
        taken.append(future.result())
    assert taken == list(range(10))


def test_a_failing_item_does_not_affect_the_others() -> None:
    def work(item: int) -> float:
        return 1 / item

    futures = [future for _, future in ahead([1, 0, 2], work, threads=2, depth=2)]
    assert [type(future.exception()) for future in futures] == [type(None), ZeroDivisionError, type(None)]


def test_no_items_give_no_results() -> None:
    assert list(ahead([], lambda item: item, threads=1, depth=1)) == []


def test_background_work_is_bounded_and_finishes() -> None:
    finished_items: list[int] = []
    gate = threading.Event()
    behind = Behind(2)

    def slow(number: int) -> None:
        gate.wait(10)
        finished_items.append(number)

    for number in range(2):
        behind.put(lambda number=number: slow(number))
    gate.set()
    behind.put(lambda: slow(2))
    behind.finish()
    assert finished_items == [0, 1, 2]


def test_an_error_in_background_work_is_raised_after_earlier_work_finished() -> None:
    finished_items: list[int] = []
    behind = Behind(4)
    behind.put(lambda: finished_items.append(1))
    behind.put(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        behind.finish()
    assert finished_items == [1]


@pytest.mark.parametrize("in_turns", [False, True])
def test_L16_work_that_hangs_is_abandoned_and_the_other_items_complete(in_turns: bool) -> None:
    """More items hang than there are threads."""
    never = threading.Event()

    def work(item: int) -> int:
        if item in (1, 2, 3):
            never.wait(60)
        return item * item

    results = list(ahead(range(8), work, threads=2, depth=4, timeout_s=0.5, in_turns=in_turns))
    never.set()
    stalled = [item for item, future in results if isinstance(future.exception(), StalledError)]
    assert stalled == [1, 2, 3]
    assert [future.result() for item, future in results if item not in stalled] == [0, 16, 25, 36, 49]


def test_several_background_threads_work_concurrently() -> None:
    """No item can finish before three of them have started."""
    meeting = threading.Barrier(3)
    arrivals: list[int] = []
    behind = Behind(8, threads=3)
    for _ in range(6):
        behind.put(lambda: arrivals.append(meeting.wait(60)))
    behind.finish()
    assert sorted(arrivals) == [0, 0, 1, 1, 2, 2]
