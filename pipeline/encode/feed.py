"""Work done ahead by a few threads, in bounded number: the encoder waits for none it does not need."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(
    items: Iterable[Item], work: Callable[[Item], Result], *, threads: int, depth: int
) -> Generator[tuple[Item, Future[Result]]]:
    """Each item with its finished work, in the order of `items`.

    At most `depth` items are in work or waiting to be taken, so memory does not grow with their number.

    Args:
        items: Read one at a time, `depth` ahead.
        work: Runs in a thread; what it raises is in the future that comes with its item.
        threads: How many work at once.
        depth: At least 1.
    """
    source = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="ahead") as pool:
        waiting: deque[tuple[Item, Future[Result]]] = deque()
        try:
            for item in islice(source, depth):
                waiting.append((item, pool.submit(work, item)))
            while waiting:
                item, future = waiting.popleft()
                future.exception()  # waits
                yield item, future
                waiting.extend((nxt, pool.submit(work, nxt)) for nxt in islice(source, 1))
        finally:
            for _, future in waiting:
                future.cancel()


class Behind:
    """Work done behind by one thread; handing over waits once `depth` pieces are unfinished."""

    def __init__(self, depth: int) -> None:
        """Start the thread."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="behind")
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
