"""The cache entries of a recipe's last evaluation, with the stats that they had when they were verified.

`tables/evaluation_entries.parquet` lets the next evaluation trust unchanged entries without reading them, and
names them for `latentline gc`, `verify` and `explain`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.recipe_entries import STAT_COLUMNS, STATS
from pipeline.cache.store import EntrySpec, Kind
from pipeline.encoding.fill import EntryRequests, FillResult
from pipeline.storage.atomic import write_atomically
from pipeline.storage.tables import read_rows, write_rows
from pipeline.trained_lora.inputs import parsed_tensors, tensors_json

if TYPE_CHECKING:
    from pipeline.storage.tables import Columns

FILE = "tables/evaluation_entries.parquet"
"""Path of the table in output_dir."""

_COLUMNS: Columns = {"kind": pl.String, "key": pl.String, "name": pl.String, "tensors": pl.String, **STATS}


def read_known(output_dir: Path) -> pl.DataFrame:
    """Return the entries of the last evaluation; no rows if the table is missing or damaged."""
    try:
        table = read_rows(output_dir / FILE)
        return table.select(pl.col(name).cast(kind) for name, kind in _COLUMNS.items())
    # The table only saves time: without it, entries are read and verified.
    except (OSError, pl.exceptions.PolarsError):
        return pl.DataFrame(schema=_COLUMNS)


def write_known(output_dir: Path, parts: Iterable[pl.DataFrame]) -> None:
    """Replace the table by the rows of `entry_rows`."""
    table = pl.concat([pl.DataFrame(schema=_COLUMNS), *parts]).unique("key", keep="first").sort("kind", "key")
    write_atomically(output_dir / FILE, partial(write_rows, table))


def entry_rows(requests: EntryRequests, result: FillResult) -> pl.DataFrame:
    """Return the valid entries of a `fill`, as rows of the table."""
    rows = requests.rows.drop(STAT_COLUMNS).join(result.entries.select("key", *STAT_COLUMNS), on="key")
    tensors = [tensors_json(requests.spec(row).tensors) for row in rows.iter_rows(named=True)]
    rows = rows.with_columns(kind=pl.lit(requests.kind), tensors=pl.Series(tensors, dtype=pl.String))
    return rows.select(pl.col(name).cast(kind) for name, kind in _COLUMNS.items())


def spec_of(row: dict[str, Any]) -> EntrySpec:
    """Return the entry of a row."""
    kind: Kind = row["kind"]
    return EntrySpec(kind, row["key"], parsed_tensors(row["tensors"]))
