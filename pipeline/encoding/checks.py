"""What is wrong with store entries, and which of the cache checks says so: shared by latents and text.

Each entry is looked at once and has at most one problem:

    completeness        it is missing, or no file is in its place
    file_size_outliers  its size is not the one that its shape and dtype ask for
    shape_uniformity    its header does not state the expected shapes and dtypes
    finite_values       its content is not what was written: checksum, another entry's, not finite

An entry whose stat is as recorded when it was last verified is not read again. With exact sizes known for
each entry, sizes need no statistics: an outlier in a bucket cannot have the size it should.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import polars as pl

from pipeline.cache.requests import is_unchanged
from pipeline.cache.store import EntrySpec, EntryStat, Kind, Store
from pipeline.checks.findings import Outcome
from pipeline.errors import counted

Problem = Literal["completeness", "file_size_outliers", "shape_uniformity", "finite_values"]

REPAIR = (
    "run the cache job, which makes what is missing or damaged: "
    "dagster job execute -m assets.definitions -j <recipe>_cache"
)


AT_ONCE = 5_000
"""Rows whose keys and stats are in memory at a time."""


class Problems:
    """The problems of some entries, by check, as rows to show."""

    def __init__(
        self, store: Store, kind: Kind, wanted: pl.DataFrame, spec_of: Callable[[dict[str, Any]], EntrySpec]
    ) -> None:
        """Look at each entry.

        Args:
            store: Where they are.
            kind: Of all of them.
            wanted: A row an entry: `sample_id` (or what else asks for it), `key`, `num_bytes`, the
                `STAT_COLUMNS` of when it was last verified, null where nothing was recorded, and what
                `spec_of` needs.
            spec_of: What the entry of a row must be.

        Raises:
            StoreError: An entry may not be read.
        """
        self.num_entries = len(wanted)
        self._rows: dict[Problem, list[dict[str, Any]]] = {}
        for part in wanted.iter_slices(AT_ONCE):
            for row in part.filter(~is_unchanged(store, kind, part)).iter_rows(named=True):
                self._look(store, row["sample_id"], spec_of(row))

    def _look(self, store: Store, name: str, spec: EntrySpec) -> None:
        state = store.check(spec)
        if state.valid:
            return
        row = {
            "sample_id": name,
            "problem": state.reason or "it is missing",
            "bytes": state.stat.num_bytes if state.stat else None,
            "expected_bytes": spec.file_bytes,
            "path": store.where(spec),
        }
        self._rows.setdefault(_kind(store, spec, state.stat), []).append(row)

    def outcome(self, check: Problem, fine: str, *, more: Sequence[Mapping[str, Any]] = ()) -> Outcome:
        """What `check` has to say: `more`, then these entries' problems; `fine` when there are none."""
        rows = [*more, *self._rows.get(check, [])]
        numbers = {"entries": self.num_entries, "problems": len(rows)}
        if not rows:
            return Outcome(True, fine, numbers=numbers)
        summary = f"{counted(len(rows), 'problem')}, the first: {rows[0]['sample_id']}: {rows[0]['problem']}"
        return Outcome(False, summary, REPAIR, rows, numbers)


def _kind(store: Store, spec: EntrySpec, stat: EntryStat | None) -> Problem:
    """The check that a missing or wrong entry belongs to."""
    if stat is None:
        return "completeness"
    stated = store.read_tensor_specs(spec)
    if not spec.may_have(stat.num_bytes):
        return "file_size_outliers"
    if stated is None or not spec.admits(stated):
        return "shape_uniformity"
    return "finite_values" if spec.holding(stated).file_bytes == stat.num_bytes else "file_size_outliers"
