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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.checks.base import Outcome
from pipeline.store import EntrySpec, EntryStat, Store

Problem = Literal["completeness", "file_size_outliers", "shape_uniformity", "finite_values"]

REPAIR = "run the job <recipe>_cache again: it makes what is missing or damaged"


@dataclass(frozen=True)
class Wanted:
    """An entry that must be there.

    Attributes:
        name: A sample, or what else asks for it.
        spec: What it must be.
        recorded: Its stat when it was last verified; None where no table recorded one.
    """

    name: str
    spec: EntrySpec
    recorded: EntryStat | None


class Problems:
    """The problems of some entries, by check, as rows to show."""

    def __init__(self, store: Store, wanted: Iterable[Wanted]) -> None:
        """Look at each entry.

        Raises:
            StoreError: An entry may not be read.
        """
        self.num_entries = 0
        self._rows: dict[Problem, list[dict[str, Any]]] = {}
        for entry in wanted:
            self.num_entries += 1
            state = store.check(entry.spec, entry.recorded)
            if state.valid:
                continue
            row = {
                "sample_id": entry.name,
                "problem": state.reason or "it is missing",
                "bytes": state.stat.num_bytes if state.stat else None,
                "expected_bytes": entry.spec.file_bytes,
                "path": str(store.path(entry.spec)),
            }
            self._rows.setdefault(_kind(store, entry.spec, state.stat), []).append(row)

    def outcome(self, check: Problem, fine: str, *, more: Sequence[Mapping[str, Any]] = ()) -> Outcome:
        """What `check` has to say: `more`, then these entries' problems; `fine` when there are none."""
        rows = [*more, *self._rows.get(check, [])]
        numbers = {"entries": self.num_entries, "problems": len(rows)}
        if not rows:
            return Outcome(True, fine, numbers=numbers)
        summary = f"{len(rows):,} problems, the first: {rows[0]['sample_id']}: {rows[0]['problem']}"
        return Outcome(False, summary, REPAIR, rows, numbers)


def _kind(store: Store, spec: EntrySpec, stat: EntryStat | None) -> Problem:
    """The check that a missing or wrong entry belongs to."""
    if stat is None:
        return "completeness"
    if stat.num_bytes != spec.file_bytes:
        return "file_size_outliers"
    return "finite_values" if store.stated(spec) == dict(spec.tensors) else "shape_uniformity"
