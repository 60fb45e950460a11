"""Tables from rows that are computed one after another."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import polars as pl

from pipeline.storage.tables.rows import ROWS_AT_ONCE, table_of, usable_and_rejected

COLUMNS = {"number": pl.Int32, "name": pl.String}


class Row(dict[str, Any]):
    """A row that a weak reference can follow."""


def test_a_table_has_all_rows_in_order_and_only_its_columns() -> None:
    count = 2 * ROWS_AT_ONCE + 3
    rows = ({"number": number, "name": f"row {number}", "other": [number]} for number in range(count))
    table = table_of(rows, COLUMNS)
    assert table.schema == pl.Schema(COLUMNS)
    assert table["number"].to_list() == list(range(count))
    assert table["name"][-1] == f"row {count - 1}"


def test_a_missing_value_is_null_and_no_rows_are_an_empty_table() -> None:
    assert table_of([{"number": 1}], COLUMNS).rows() == [(1, None)]
    assert table_of([], COLUMNS).schema == pl.Schema(COLUMNS)


def test_few_rows_are_in_memory_as_dictionaries() -> None:
    alive = most = 0
    references: list[weakref.ref[Row]] = []

    def ended(_: weakref.ref[Row]) -> None:
        nonlocal alive
        alive -= 1

    def rows() -> Iterator[Row]:
        nonlocal alive, most
        for number in range(4 * ROWS_AT_ONCE):
            row = Row(number=number, name="")
            references.append(weakref.ref(row, ended))
            alive += 1
            most = max(most, alive)
            yield row

    table_of(rows(), COLUMNS)
    assert ROWS_AT_ONCE <= most <= 2 * ROWS_AT_ONCE


def test_rows_with_a_reason_are_rejected() -> None:
    rows = [{"number": 1, "name": "a"}, {"name": "b", "reason": "truncated"}, {"number": 3, "name": "c"}]
    usable, rejected = usable_and_rejected(rows, COLUMNS, {"name": pl.String, "reason": pl.String})
    assert usable.rows() == [(1, "a"), (3, "c")]
    assert rejected.rows() == [("b", "truncated")]
