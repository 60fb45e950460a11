"""Calls in several threads, which end together if one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from pipeline.processes.thread_stop import stopped_by

_PAUSE_S = 0.5
"""Longest wait for the calls before this thread handles signals."""


@dataclass(frozen=True)
class Concurrency:
    """How many variants are trained at the same time.

    Attributes:
        number: Largest number of trainings at the same time. `launch` is called in that many threads, and
            the result of the sweep does not depend on it.
        place: Entered by the thread of the sweep around several trainings, for example to wait for a GPU.
    """

    number: int = 1
    place: Callable[[], AbstractContextManager[object]] = nullcontext


ONE_AT_A_TIME = Concurrency()


def call_concurrently(calls: Sequence[Callable[[], object]], number: int) -> None:
    """Make all calls, at most `number` at the same time, and start them in their order.

    If a call raises an error, or a signal interrupts this thread, no other call starts, and the running ones
    stop the processes that they wait for. The error is raised when they have ended.
    """
    if number == 1:
        for call in calls:
            call()
        return

    ready, stopped = threading.Event(), threading.Event()
    errors = list[BaseException]()

    def begin(call: Callable[[], object]) -> None:
        # Not before all futures are in the list: a signal could come in between.
        ready.wait()
        if stopped.is_set():
            return
        try:
            with stopped_by(stopped):
                call()
        except BaseException as err:
            # Before the event, after which the other calls raise errors that only say that they were stopped.
            errors.append(err)
            # Here and not in the waiting thread, or this thread would begin another call before that.
            stopped.set()
            raise

    with ThreadPoolExecutor(number, thread_name_prefix="sweep") as pool:
        futures = list[Future[None]]()
        try:
            futures = [pool.submit(begin, call) for call in calls]
            ready.set()
            # Not without an end: a signal just before a wait begins would not interrupt it.
            while wait(futures, timeout=_PAUSE_S, return_when=FIRST_EXCEPTION).not_done and not errors:
                pass
            if errors:
                raise errors[0]
        except BaseException:
            stopped.set()
            ready.set()
            wait(futures)
            raise
