"""Bounded work in background threads: prefetching inputs before the encoder, writing entries behind it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from queue import SimpleQueue
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class StalledError(Exception):
    """A piece of work did not finish within the timeout."""


def ahead(
    items: Iterable[Item],
    work: Callable[[Item], Result],
    *,
    threads: int,
    depth: int,
    in_turns: bool = False,
    timeout_s: float | None = None,
) -> Generator[tuple[Item, Future[Result]]]:
    """Yield each item with its finished future, in the order of `items`.

    Items are read at most `depth` ahead. `work` runs in a thread; its exceptions are stored in the future. An
    item that takes longer than `timeout_s` gets a `StalledError`, and a new thread replaces the one that
    hangs. If `in_turns`, the threads finish `depth` items, rest until the caller has taken them all, and go
    on with the next `depth` items.
    """
    source = iter(items)
    pool = _ReplaceablePool(work, threads)
    pending: deque[tuple[Item, Future[Result]]] = deque()
    try:
        # Filled to the depth first, then one new item for each that is taken: memory stays bounded.
        pending.extend((item, pool.submit(item)) for item in islice(source, depth))
        while pending:
            number = len(pending) if in_turns else 1
            finished = deque(
                (item, _finished(future, pool, timeout_s)) for item, future in islice(pending, number)
            )
            for _ in range(number):
                pending.popleft()
                yield finished.popleft()
            pending.extend((item, pool.submit(item)) for item in islice(source, number))
    finally:
        for _, future in pending:
            future.cancel()
        pool.stop()


def _finished(
    future: Future[Result], pool: _ReplaceablePool[Item, Result], timeout_s: float | None
) -> Future[Result]:
    # The oldest unfinished item is always in progress, because earlier ones are finished or their threads
    # replaced. So the timeout does not include waiting for a thread.
    try:
        future.exception(timeout=timeout_s)
    except TimeoutError:
        pool.replace_thread()
        stalled: Future[Result] = Future()
        stalled.set_exception(StalledError(f"not finished in {timeout_s:.0f} s"))
        return stalled
    return future


class _ReplaceablePool(Generic[Item, Result]):
    """Daemon threads that share a queue; a hanging thread can be replaced."""

    def __init__(self, work: Callable[[Item], Result], threads: int) -> None:
        self._work = work
        self._queue: SimpleQueue[tuple[Item, Future[Result]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_hung = 0
        for _ in range(threads):
            self._start_thread()

    def submit(self, item: Item) -> Future[Result]:
        future: Future[Result] = Future()
        self._queue.put((item, future))
        return future

    def replace_thread(self) -> None:
        self._num_hung += 1
        self._start_thread()

    def stop(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        # Joining a thread that hangs in a read would hang the process, too.
        for thread in [] if self._num_hung else self._threads:
            thread.join()

    def _start_thread(self) -> None:
        # Unlike an executor's threads, a daemon thread that hangs does not keep the process alive.
        thread = threading.Thread(target=self._serve, name=f"ahead-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            _run(*task, self._work)
            del task  # a result may be large


def _run(item: Item, future: Future[Result], work: Callable[[Item], Result]) -> None:
    # As in an executor, a future that was cancelled while it was queued is not computed.
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work(item)
    except BaseException as err:  # reraised by whoever reads the future
        future.set_exception(err)
    else:
        future.set_result(result)


class Behind:
    """Runs calls in background threads, such as writes of finished entries while the next batch is encoded.

    `put` returns at once unless more than `depth` calls are unfinished; then it waits for the oldest. Calls
    start in the order in which they were submitted, and finish in any order.
    """

    def __init__(self, depth: int, *, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="behind")
        self._unfinished: deque[Future[None]] = deque()
        self._depth = depth

    def put(self, work: Callable[[], None]) -> None:
        """Submit a call; raises what an earlier call raised."""
        self._unfinished.append(self._pool.submit(work))
        # The oldest call is awaited, so that its error is raised close to its cause.
        while len(self._unfinished) > self._depth:
            self._unfinished.popleft().result()

    def finish(self) -> None:
        """Wait for all calls; raises what a call raised."""
        try:
            while self._unfinished:
                self._unfinished.popleft().result()
        finally:
            self._pool.shutdown()
