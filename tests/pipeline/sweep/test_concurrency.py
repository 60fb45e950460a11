"""Calls in several threads: their number, an error, and an interrupt of the thread that waits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from pipeline.errors import StoppedError
from pipeline.processes.thread_stop import pause
from pipeline.sweep.concurrency import call_concurrently


def test_as_many_calls_as_allowed_run_at_the_same_time() -> None:
    together, done = threading.Barrier(2), list[int]()

    def call(number: int) -> None:
        # Broken unless two calls are here within the time.
        together.wait(timeout=60)
        done.append(number)

    call_concurrently([partial(call, number) for number in range(4)], 2)
    assert sorted(done) == [0, 1, 2, 3]
    in_order = list[int]()
    call_concurrently([partial(in_order.append, number) for number in range(4)], 1)
    assert in_order == [0, 1, 2, 3]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle Ctrl-C as in a terminal: a shell starts background processes, maybe these tests, without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("is_interrupt", [False, True])
def test_an_error_or_a_signal_stops_the_running_calls_and_starts_no_other(
    is_interrupt: bool, interruptible: None
) -> None:
    second_runs, called = threading.Event(), list[str]()
    main = threading.main_thread().ident
    assert main is not None

    def wait_for_process(name: str) -> None:
        try:
            while True:
                pause(60)
        except StoppedError:
            called.append(name)
            raise

    def fail() -> None:
        second_runs.wait(timeout=60)
        if not is_interrupt:
            raise ValueError("the first call failed")
        # The system gives signals of a process to its main thread, if that does not block them.
        signal.pthread_kill(main, signal.SIGINT)
        wait_for_process("first stopped")

    def run() -> None:
        second_runs.set()
        wait_for_process("second stopped")

    calls = [fail, run, partial(called.append, "third")]
    with pytest.raises(KeyboardInterrupt if is_interrupt else ValueError):
        call_concurrently(calls, 2)
    assert sorted(called) == [*["first stopped"][: int(is_interrupt)], "second stopped"]
