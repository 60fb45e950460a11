"""Checks on cache entries, shared by vae_latents and text_embeddings.

Each entry is checked once and has at most one problem, which belongs to one check:

    completeness        the entry is missing, or its path is not a file
    file_size_outliers  its size differs from the size that follows from shape and dtype
    shape_uniformity    its header has other shapes or dtypes
    finite_values       its content is wrong: checksum, another entry's key, or values that are not finite
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import polars as pl

from pipeline.cache.recipe_entries import is_unchanged
from pipeline.cache.store import EntrySpec, EntryStat, EntryState, Kind, Store
from pipeline.errors import RUN_RECIPE, counted
from pipeline.log import Log
from pipeline.reporting.findings import Outcome
from pipeline.reporting.progress import phase, progress

Problem = Literal["completeness", "file_size_outliers", "shape_uniformity", "finite_values"]

REPAIR = f"run the cache job, which encodes missing and damaged entries: {RUN_RECIPE} <recipe> --cache-only"

AT_ONCE = 5_000
"""Number of rows with keys and stats in memory at a time."""

ROWS_AT_A_TIME = 1024
"""Number of rows with specifications and states in memory at a time."""

CheckedEntry = tuple[dict[str, Any], EntrySpec, EntryState]
"""A row, its entry, and the state of the entry."""


def check_entries(
    store: Store, rows: pl.DataFrame, spec_of: Callable[[dict[str, Any]], EntrySpec], *, log: Log
) -> Iterator[list[CheckedEntry]]:
    """Yield all rows in slices, in order, with the states of their entries.

    `rows` has one row per entry, with the columns that `spec_of` needs.

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


class Problems:
    """Problems of some entries, grouped by check."""

    def __init__(
        self,
        store: Store,
        kind: Kind,
        requests: pl.DataFrame,
        spec_of: Callable[[dict[str, Any]], EntrySpec],
        *,
        log: Log,
    ) -> None:
        """Check each entry, unless it still has the stat of its last verification.

        `requests` has one row per entry: `sample_id` (or another name), `key`, `num_bytes`, the
        `STAT_COLUMNS` recorded when it was verified (null if never), and the columns that `spec_of` needs.

        Raises:
            StoreError: An entry cannot be read.
        """
        self.num_entries = len(requests)
        self._rows: dict[Problem, list[dict[str, Any]]] = {}
        with phase("comparing cache entries with the last run", log=log):
            # In slices, so that the stats of millions of entries are never in memory together.
            parts = requests.iter_slices(AT_ONCE)
            changed = [part.filter(~is_unchanged(store, kind, part)) for part in parts]
        if not changed:
            return

        # An unchanged stat means that the entry was verified before. Reading all entries would take hours.
        for entries in check_entries(store, pl.concat(changed), spec_of, log=log):
            for row, spec, state in entries:
                if not state.valid:
                    self._add(store, row["sample_id"], spec, state)

    def _add(self, store: Store, name: str, spec: EntrySpec, state: EntryState) -> None:
        row = {
            "sample_id": name,
            "problem": state.reason or "the entry is missing",
            "bytes": state.stat.num_bytes if state.stat else None,
            "expected_bytes": spec.file_bytes,
            "path": state.place_in_pack or store.where(spec),
        }
        self._rows.setdefault(_check_of(store, spec, state.stat), []).append(row)

    def rows(self, check: Problem) -> list[dict[str, Any]]:
        """Return the problems of a check, one mapping per entry."""
        return self._rows.get(check, [])

    def outcome(
        self, check: Problem, passed_summary: str, *, more: Sequence[Mapping[str, Any]] = ()
    ) -> Outcome:
        """Return the outcome of a check; the problems in `more` come first."""
        rows = [*more, *self.rows(check)]
        numbers = {"entries": self.num_entries, "problems": len(rows)}
        if not rows:
            return Outcome(True, passed_summary, numbers=numbers)
        first = f"{rows[0]['sample_id']}: {rows[0]['problem']}"
        return Outcome(False, f"{counted(len(rows), 'problem')}, the first: {first}", REPAIR, rows, numbers)


def _check_of(store: Store, spec: EntrySpec, stat: EntryStat | None) -> Problem:
    if stat is None:
        return "completeness"
    if not spec.may_have(stat.num_bytes):
        return "file_size_outliers"

    # In this order, because each check presumes that the earlier ones passed.
    stored = store.read_tensor_specs(spec)
    if stored is None or not spec.admits(stored):
        return "shape_uniformity"
    return "finite_values" if spec.holding(stored).file_bytes == stat.num_bytes else "file_size_outliers"
