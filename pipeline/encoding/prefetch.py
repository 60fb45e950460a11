"""Work done ahead by a few threads, in bounded number: the encoder waits for none it does not need."""

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
    """A piece of work was given up, because it went on for too long."""


def ahead(
    items: Iterable[Item],
    work: Callable[[Item], Result],
    *,
    threads: int,
    depth: int,
    patience_s: float | None = None,
) -> Generator[tuple[Item, Future[Result]]]:
    """Each item with its finished work, in the order of `items`.

    At most `depth` items are in work or waiting to be taken, so memory does not grow with their number.

    Args:
        items: Read one at a time, `depth` ahead.
        work: Runs in a thread; what it raises is in the future that comes with its item.
        threads: How many work at once.
        depth: At least 1.
        patience_s: An item that is waited for so long comes with a `StalledError`, and another thread takes
            the place of the one that hangs, which nobody can end: it is left behind, and does not keep the
            process alive. None: no end of patience.
    """
    source = iter(items)
    crew = _Crew(work, threads)
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        waiting.extend((item, crew.take(item)) for item in islice(source, depth))
        while waiting:
            item, future = waiting.popleft()
            yield item, _finished(future, crew, patience_s)
            waiting.extend((nxt, crew.take(nxt)) for nxt in islice(source, 1))
    finally:
        for _, future in waiting:
            future.cancel()
        crew.leave()


def _finished(future: Future[Result], crew: _Crew[Item, Result], patience_s: float | None) -> Future[Result]:
    """The future itself once it is done; one with a `StalledError` when it is not in time."""
    try:
        future.exception(timeout=patience_s)
    except TimeoutError:
        crew.replace_one()
        stalled: Future[Result] = Future()
        stalled.set_exception(StalledError(f"not finished in {patience_s:.0f} s"))
        return stalled
    return future


class _Crew(Generic[Item, Result]):
    """Daemon threads that take work from one queue: unlike an executor's they can be left behind.

    The oldest work is always under way: what is before it is finished, or its thread was replaced.
    """

    def __init__(self, work: Callable[[Item], Result], threads: int) -> None:
        self._work = work
        self._queue: SimpleQueue[tuple[Item, Future[Result]] | None] = SimpleQueue()
        self._members: list[threading.Thread] = []
        self._lost = 0
        for _ in range(threads):
            self._hire()

    def take(self, item: Item) -> Future[Result]:
        future: Future[Result] = Future()
        self._queue.put((item, future))
        return future

    def replace_one(self) -> None:
        self._lost += 1
        self._hire()

    def leave(self) -> None:
        """Send everybody home; waits for those who can come."""
        for _ in self._members:
            self._queue.put(None)
        for member in [] if self._lost else self._members:
            member.join()

    def _hire(self) -> None:
        member = threading.Thread(target=self._serve, name=f"ahead-{len(self._members)}", daemon=True)
        self._members.append(member)
        member.start()

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            _end(*task, self._work)
            del task  # a result may be large


def _end(item: Item, future: Future[Result], work: Callable[[Item], Result]) -> None:
    """As an executor does it: whatever `work` raises belongs to the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work(item)
    except BaseException as err:
        future.set_exception(err)
    else:
        future.set_result(result)


class Behind:
    """Work done behind by a few threads; handing over waits once `depth` pieces are unfinished.

    Pieces are begun in the order in which they came, and end in any order.
    """

    def __init__(self, depth: int, *, threads: int = 1) -> None:
        """Start the threads."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="behind")
        self._unfinished: deque[Future[None]] = deque()
        self._depth = depth

    def put(self, work: Callable[[], None]) -> None:
        """Hand over a piece of work.

        Raises:
            Exception: What an earlier piece raised.
        """
        self._unfinished.append(self._pool.submit(work))
        while len(self._unfinished) > self._depth:
            self._unfinished.popleft().result()

    def finish(self) -> None:
        """Wait for all of it.

        Raises:
            Exception: What a piece raised.
        """
        try:
            while self._unfinished:
                self._unfinished.popleft().result()
        finally:
            self._pool.shutdown()
