"""One function over many items in threads, with bounded memory, and telling how far it is.

Threads suffice: Pillow's decoders, hashing and file reads release the interpreter's lock.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pipeline.reporting.progress import progress
from pipeline.reporting.reports import Log

Item = TypeVar("Item")
Result = TypeVar("Result")

CHUNK_ITEMS = 16
"""Items that a thread takes at once, at most."""

CHUNK_S = 0.004
"""So long a thread is at work on what it takes at once: much longer than taking takes, and so short that all
threads end at the same moment."""


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
    """Results in the order of the items; at most `3 * CHUNK_ITEMS` items a thread are under way at any time.

    Args:
        function: Called in threads; what it raises is raised here.
        items: All items.
        log: Told how far it is, where there is no terminal for a bar.
        doing: What happens to an item, such as "images decoded".
        threads: How many; one a core by default.
    """

    def work(chunk: Sequence[Item]) -> tuple[list[Result], float]:
        start_s = time.perf_counter()
        return [function(item) for item in chunk], time.perf_counter() - start_s

    threads = threads or num_threads()
    taken, done, chunk_items = 0, 0, 1
    under_way: deque[Future[tuple[list[Result], float]]] = deque()
    with (
        progress(lambda: done, len(items), doing, log=log),
        ThreadPoolExecutor(threads, thread_name_prefix="ingest") as pool,
    ):
        try:
            while done < len(items):
                # Whole chunks only: cut to what is left of the bound they would become ever smaller.
                while taken < len(items) and taken + chunk_items - done <= 3 * threads * CHUNK_ITEMS:
                    under_way.append(pool.submit(work, items[taken : taken + chunk_items]))
                    taken += chunk_items
                results, seconds = under_way.popleft().result()
                chunk_items = max(1, min(CHUNK_ITEMS, int(CHUNK_S * len(results) / max(seconds, 1e-9))))
                for result in results:
                    done += 1
                    yield result
        finally:
            for future in under_way:
                future.cancel()
