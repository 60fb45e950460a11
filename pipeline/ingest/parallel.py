"""One function over many items in threads, with bounded memory, and telling how far it is.

Threads suffice: Pillow's decoders, hashing and file reads release the interpreter's lock.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pipeline.progress import progress
from pipeline.reports import Log

Item = TypeVar("Item")
Result = TypeVar("Result")

CHUNK_ITEMS = 16
"""Items a thread takes at once."""


def num_threads() -> int:
    """One a core that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def in_threads(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    log: Log,
    doing: str,
    threads: int | None = None,
) -> Iterator[Result]:
    """Results in the order of the items; a few chunks a thread are under way at any time.

    Args:
        function: Called in threads; what it raises is raised here.
        items: All items.
        log: Told how far it is, where there is no terminal for a bar.
        doing: What happens to an item, such as "images decoded".
        threads: How many; one a core by default.
    """

    def work(chunk: Sequence[Item]) -> list[Result]:
        return [function(item) for item in chunk]

    threads = threads or num_threads()
    done = 0
    under_way: deque[Future[list[Result]]] = deque()
    with (
        progress(lambda: done, len(items), doing, log=log),
        ThreadPoolExecutor(threads, thread_name_prefix="ingest") as pool,
    ):
        try:
            for first in range(0, len(items) + 3 * threads * CHUNK_ITEMS, CHUNK_ITEMS):
                if first < len(items):
                    under_way.append(pool.submit(work, items[first : first + CHUNK_ITEMS]))
                if not under_way or (first < len(items) and len(under_way) <= 3 * threads):
                    continue
                for result in under_way.popleft().result():
                    done += 1
                    yield result
        finally:
            for future in under_way:
                future.cancel()
