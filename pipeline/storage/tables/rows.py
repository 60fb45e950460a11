"""Tables from rows that are computed one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import polars as pl

ROWS_AT_ONCE = 4_096
"""Number of rows that become a part of the table together."""


def table_of(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Any]) -> pl.DataFrame:
    """Return a table with these columns from rows that may have more of them; a missing value is null."""
    # In parts, because a dictionary takes several times the memory of its row in the table.
    remaining = iter(rows)
    parts = [pl.DataFrame(schema=columns)]
    while part := list(islice(remaining, ROWS_AT_ONCE)):
        parts.append(pl.DataFrame(part, schema=columns))
    return pl.concat(parts)


def usable_and_rejected(
    rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Any], rejected_columns: Mapping[str, Any]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return a table of the rows without `reason` and one of the rejected rows, which have one."""
    rejected: list[Mapping[str, Any]] = []

    def usable() -> Iterator[Mapping[str, Any]]:
        for row in rows:
            if "reason" in row:
                rejected.append(row)
            else:
                yield row

    table = table_of(usable(), columns)
    return table, pl.DataFrame(rejected, schema=rejected_columns)
