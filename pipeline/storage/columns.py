"""Columns of strings put in order and joined, in little memory beside them.

While Polars joins two tables by a column of keys it holds 150 to 200 bytes for each row, and then a copy of
every column. Here it is 30 bytes, and no column is copied that both tables have in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.storage.tables import only

_AT_A_TIME = 8_192

Hash = Callable[[pl.Series], pl.Series]


def beside(table: pl.DataFrame, others: pl.DataFrame, on: str) -> pl.DataFrame:
    """`table`, and from the first row of `others` with the same value in `on` its columns; or else nulls.

    Args:
        table: Rows in any order, which they keep.
        others: The column `on`, without nulls, and some that `table` does not have. Rows of one value are
            the same.
        on: Name of a column of strings.
    """
    columns = others.drop(on)
    if not table[on].equals(others[on]):
        columns = columns.select(pl.all().gather(places_in(others[on], table[on])))
    return put_beside(table, columns)


def joined(table: pl.DataFrame, others: pl.DataFrame, on: str) -> pl.DataFrame:
    """As `beside`, but for the rows of `table` of whose value `others` has none."""
    columns = others.drop(on)
    if table[on].equals(others[on]):
        return put_beside(table, columns)
    places = places_in(others[on], table[on])
    found = columns.select(pl.all().gather(places.drop_nulls()))
    return put_beside(only(table, places.is_not_null()), found)


def put_beside(table: pl.DataFrame, columns: pl.DataFrame) -> pl.DataFrame:
    """`table` and some more columns of as many rows, which are cut into chunks as its own.

    A table that was read is a chunk for each row group; where columns are not cut alike, Polars makes a copy
    of the whole table before it computes anything from it.
    """
    lengths = table.to_series(0).chunk_lengths()
    if any(column.chunk_lengths() != lengths for column in columns):
        whole = columns.rechunk()
        starts = accumulate(lengths, initial=0)
        columns = pl.concat([whole.slice(start, rows) for start, rows in zip(starts, lengths, strict=False)])
    return table.hstack(columns)


def with_constant(table: pl.DataFrame, name: str, value: Any, kind: Any) -> pl.DataFrame:
    """`table` and a column of one value, of the Polars type `kind`."""
    return put_beside(table, pl.repeat(value, len(table), dtype=kind, eager=True).alias(name).to_frame())


def with_one_of(table: pl.DataFrame, values: Iterable[str], on: str) -> pl.DataFrame:
    """The rows with one of a few values in the column `on`."""
    few = pl.Series(list(values), dtype=pl.String)
    return only(table, places_in(few, table[on]).is_not_null())


def first_of_each(table: pl.DataFrame, on: str) -> pl.DataFrame:
    """The rows whose value in `on` no row above them has; the table itself where that is so of all."""
    return only(table, is_first(table[on]))


def is_first(values: pl.Series) -> pl.Series:
    """For each value whether none above it is the same."""
    again = repeated(values)
    first = ~again.to_numpy()
    first[~first] = values.filter(again).is_first_distinct().to_numpy()
    return pl.Series(first)


def repeated(values: pl.Series, *, hashed: Hash = pl.Series.hash) -> pl.Series:
    """For each value, none of them null, whether it occurs more than once; `hashed` as for `places_in`."""
    hashes = hashed(values).to_numpy()
    order = np.argsort(hashes)
    same = hashes[order[:-1]] == hashes[order[1:]]
    again = np.zeros(len(values), np.bool_)
    again[order[:-1][same]] = again[order[1:][same]] = True
    if same.any():  # or their hashes alone
        again[again] = values.filter(pl.Series(again)).is_duplicated().to_numpy()
    return pl.Series(again)


def num_distinct(values: pl.Series) -> int:
    """How many different values there are; nothing is held where they rise, as names in a table mostly do."""
    return len(values) if (values[:-1] < values[1:]).all() else int(is_first(values).sum())


def num_beyond(values: pl.Series, others: pl.Series) -> int:
    """How many different values there are that are not among `others`."""
    if values.equals(others):
        return 0
    return values.filter(places_in(others, values).is_null()).n_unique()


def places_in(column: pl.Series, values: pl.Series, *, hashed: Hash = pl.Series.hash) -> pl.Series:
    """The first row of `column` with each of `values`, UInt32; null where there is none.

    Args:
        column: Strings without nulls.
        values: Likewise.
        hashed: Gives equal values equal UInt64; values that differ may have equal ones, at the cost of time.
    """
    hashes = hashed(column).to_numpy()
    order = np.argsort(hashes, kind="stable").astype(np.uint32)
    hashes = hashes[order]
    parts = [_places(column, order, hashes, part, hashed(part).to_numpy()) for part in slices(values)]
    return pl.concat(parts) if parts else pl.Series(dtype=pl.UInt32)


def _places(
    column: pl.Series,
    order: npt.NDArray[np.uint32],
    hashes: npt.NDArray[np.uint64],
    values: pl.Series,
    wanted: npt.NDArray[np.uint64],
) -> pl.Series:
    """As `places_in`: `order` sorts the column's `hashes`, and `wanted` are those of the values."""
    places = np.full(len(values), -1, np.int64)
    at = np.searchsorted(hashes, wanted)
    left = np.arange(len(values))
    while True:
        left = left[at[left] < len(hashes)]
        left = left[hashes[at[left]] == wanted[left]]
        if not len(left):
            return pl.Series(places).cast(pl.UInt32, strict=False)  # what is negative becomes null
        rows = order[at[left]]
        same = (column.gather(rows) == values.gather(left)).to_numpy()
        places[left[same]] = rows[same]
        left = left[~same]
        at[left] += 1


def distinct(values: pl.Series) -> pl.Series:
    """Each value once, in the order of its UTF-8; there are no nulls."""
    ordered = values.sort()
    first = ordered != ordered.shift(1)
    return ordered.filter(first.fill_null(value=True)) if not first[1:].all() else ordered


def slices(values: pl.Series) -> Iterator[pl.Series]:
    """The column some thousand rows at a time, because strings of Python's take much more memory."""
    for start in range(0, len(values), _AT_A_TIME):
        yield values.slice(start, _AT_A_TIME)


def strings(values: pl.Series) -> Iterator[Any]:
    """Each value in turn."""
    for part in slices(values):
        yield from part.to_list()
