"""Call one function for many items in threads, in order, with bounded memory and progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pipeline.log import Log
from pipeline.processes.launch import num_cores
from pipeline.reporting.progress import progress

Item = TypeVar("Item")
Result = TypeVar("Result")

ITEMS_PER_THREAD = 32
"""Maximum number of items per thread that are in progress or waiting to be yielded."""


def in_threads(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    log: Log,
    doing: str,
    threads: int | None = None,
) -> Iterator[Result]:
    """Yield `function(item)` in the order of the items, at most `ITEMS_PER_THREAD` items per thread ahead.

    An exception of `function` is raised here. By default there is one thread per core. `doing` labels the
    progress, such as "images decoded".
    """
    threads = threads or num_cores()
    num_done = 0
    pending: deque[Future[Result]] = deque()

    # Threads are enough: Pillow's decoders, hashing and file reads release the interpreter lock.
    with (
        progress(lambda: num_done, len(items), doing, log=log),
        ThreadPoolExecutor(threads, thread_name_prefix="in_threads") as pool,
    ):
        try:
            for item in items:
                # The window bounds memory when the caller is slower than the threads.
                if len(pending) == threads * ITEMS_PER_THREAD:
                    result = pending.popleft().result()
                    num_done += 1
                    yield result
                pending.append(pool.submit(function, item))

            while pending:
                result = pending.popleft().result()
                num_done += 1
                yield result
        finally:
            # The caller may stop early, or the function may have failed.
            pool.shutdown(wait=False, cancel_futures=True)
