"""Calls in several threads: their number, an error, and an interrupt of the thread that waits."""

from __future__ import annotations

import signal
import threading
from functools import partial

import pytest

from pipeline.sweep.concurrency import call_concurrently


def test_as_many_calls_as_allowed_run_at_the_same_time() -> None:
    together, done = threading.Barrier(2), list[int]()

    def call(number: int) -> None:
        # Broken unless two calls are here within the time.
        together.wait(timeout=60)
        done.append(number)

    call_concurrently([partial(call, number) for number in range(4)], 2, list)
    assert sorted(done) == [0, 1, 2, 3]
    in_order = list[int]()
    call_concurrently([partial(in_order.append, number) for number in range(4)], 1, list)
    assert in_order == [0, 1, 2, 3]


@pytest.mark.parametrize("is_interrupt", [False, True])
def test_an_error_or_a_signal_stops_the_running_calls_and_starts_no_other(is_interrupt: bool) -> None:
    stop, second_runs, called = threading.Event(), threading.Event(), list[str]()
    main = threading.main_thread().ident
    assert main is not None

    def fail() -> None:
        second_runs.wait(timeout=60)
        if is_interrupt:
            # The system gives signals of a process to its main thread, if that does not block them.
            signal.pthread_kill(main, signal.SIGINT)
            stop.wait(timeout=60)
            return
        raise ValueError("the first call failed")

    def run() -> None:
        second_runs.set()
        called.append("stopped" if stop.wait(timeout=60) else "not stopped")

    calls = [fail, run, partial(called.append, "third")]
    with pytest.raises(KeyboardInterrupt if is_interrupt else ValueError):
        call_concurrently(calls, 2, stop.set)
    assert called == ["stopped"]
