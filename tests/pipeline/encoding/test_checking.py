"""Entries are checked in threads, in order, and the progress is reported."""

from __future__ import annotations

import threading
from pathlib import Path

import polars as pl
import pytest

from pipeline.cache.store import EntrySpec, EntryStat, EntryState, Store
from pipeline.encoding import checking
from pipeline.encoding.checking import check_entries
from pipeline.reporting.reports import discard
from tests.pipeline.packs_case import spec_of, write_entries


class StoreOfFourThreads(Store):
    """A store whose checks end when four of them run at the same time."""

    threads = 4

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.barrier = threading.Barrier(4, timeout=10)

    def check(self, spec: EntrySpec, trusted: EntryStat | None = None) -> EntryState:
        self.barrier.wait()
        return super().check(spec, trusted)


def test_entries_are_checked_at_the_same_time_and_yielded_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "ROWS_AT_A_TIME", 8)
    store = StoreOfFourThreads(tmp_path)
    write_entries(Store(tmp_path), 10)
    rows = pl.DataFrame({"number": range(12)})
    parts = list(check_entries(store, rows, lambda row: spec_of(row["number"]), log=discard))
    assert [len(part) for part in parts] == [8, 4]
    checked = [each for part in parts for each in part]
    assert [row["number"] for row, _, _ in checked] == list(range(12))
    assert [spec for _, spec, _ in checked] == [spec_of(number) for number in range(12)]
    assert [state.status for _, _, state in checked] == 10 * ["valid"] + 2 * ["missing"]


def test_the_progress_of_checks_is_reported(tmp_path: Path, progress_lines: list[str]) -> None:
    store = Store(tmp_path)
    write_entries(store, 3)
    rows = pl.DataFrame({"number": range(3)})
    list(check_entries(store, rows, lambda row: spec_of(row["number"]), log=progress_lines.append))
    assert progress_lines[-1].startswith("cache entries checked: 3 of 3, ")


def test_no_rows_need_no_checks(tmp_path: Path) -> None:
    rows = pl.DataFrame(schema={"number": pl.Int64})
    assert list(check_entries(Store(tmp_path), rows, lambda row: spec_of(row["number"]), log=discard)) == []
