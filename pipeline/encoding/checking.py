"""Check the entries of many rows in threads, with progress: for jobs, their gates, and forecasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import polars as pl

from pipeline.cache.store import EntrySpec, EntryState, Store
from pipeline.reporting.progress import progress
from pipeline.reporting.reports import Log

ROWS_AT_A_TIME = 1024
"""Number of rows whose specifications and states are in memory at a time."""

CheckedEntry = tuple[dict[str, Any], EntrySpec, EntryState]
"""A row, its entry, and the state of the entry."""


def check_entries(
    store: Store, rows: pl.DataFrame, spec_of: Callable[[dict[str, Any]], EntrySpec], *, log: Log
) -> Iterator[list[CheckedEntry]]:
    """Yield all rows in slices, in order, with the states of their entries.

    Args:
        store: Store of the entries.
        rows: One row per entry, with the columns that `spec_of` needs.
        spec_of: Returns the specification of a row's entry.
        log: Receives the progress.

    Raises:
        StoreError: An entry cannot be read.
    """
    num_checked = 0

    def check(spec: EntrySpec) -> EntryState:
        nonlocal num_checked
        state = store.check(spec)
        num_checked += 1  # only shown, so that a lost update between threads does no harm
        return state

    with (
        progress(lambda: num_checked, len(rows), "cache entries checked", log=log),
        ThreadPoolExecutor(store.threads, thread_name_prefix="latentline-check") as pool,
    ):
        for part in rows.iter_slices(ROWS_AT_A_TIME):
            part_rows = part.to_dicts()
            specs = list(map(spec_of, part_rows))
            yield list(zip(part_rows, specs, pool.map(check, specs), strict=True))
