"""Rows that come one by one, kept as columns: as dictionaries they take ten times the memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import polars as pl

_ROWS_OF_A_PART = 2_000


class Gathered:
    """The rows so far, of one schema."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """None yet."""
        self._schema = dict(schema)
        self._parts: list[pl.DataFrame] = []
        self._rows: list[tuple[Any, ...]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """One more; what it has beside the columns is left out, and what it lacks is null."""
        self._rows.append(tuple(row.get(name) for name in self._schema))
        if len(self._rows) >= _ROWS_OF_A_PART:
            self._pack()

    def frame(self) -> pl.DataFrame:
        """All rows in the order in which they came.

        Raises:
            PolarsError: A value is of another type than its column.
        """
        self._pack()
        return pl.concat(self._parts) if self._parts else pl.DataFrame(schema=self._schema)

    def _pack(self) -> None:
        if self._rows:
            self._parts.append(pl.DataFrame(self._rows, schema=self._schema, orient="row", strict=True))
            self._rows = []


def rows_at(table: pl.DataFrame, places: array[int]) -> pl.DataFrame:
    """The rows at ascending places, of the array type "q": the table itself, and no copy, where it is all."""
    return table if len(places) == len(table) else table[np.frombuffer(places, dtype=np.int64)]


class Rows(Sequence[tuple[Any, ...]]):
    """The rows of a table as a sequence of tuples, of which only those that are asked for are made."""

    def __init__(self, table: pl.DataFrame) -> None:
        """Of this table."""
        self._table = table

    def __len__(self) -> int:
        """How many there are."""
        return len(self._table)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """One by one."""
        return self._table.iter_rows()

    @overload
    def __getitem__(self, place: int) -> tuple[Any, ...]: ...

    @overload
    def __getitem__(self, place: slice) -> list[tuple[Any, ...]]: ...

    def __getitem__(self, place: int | slice) -> tuple[Any, ...] | list[tuple[Any, ...]]:
        """One row, or those of a slice."""
        return self._table.row(place) if isinstance(place, int) else self._table[place].rows()
