"""Schemas of the tables: one Pandera schema per asset, and one for rejected samples.

Tables hold facts and the cache holds tensors. Tables are joined by `sample_id` or `key`, never by position.

| table | one row per |
|---|---|
| raw_images, validated_dataset, trained_lora | sample |
| aspect_buckets | sample and bucket (several buckets only with `buckets.per_image: each`) |
| vae_latents | sample, bucket and mirroring |
| text_embeddings | sample and caption variant |
| captions | sample that the model captioned |
| diagnosis | sample and caption variant |
| evaluation | drawn picture, scorer and number |
| sweep | variant, seed and step after which it was judged |
| rejected | sample and the stage that rejected it |

The tables of recipes with side inputs, such as masks, have more columns at their end: `SIDE_INPUT_COLUMNS`.
The column `decoding` follows if an image has decoding rules, see `images/decode.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import TableError
from pipeline.storage import table_columns
from pipeline.storage.table_columns import ASSET_COLUMNS, OPTIONAL_ASSETS, OPTIONAL_COLUMNS, REJECTED_COLUMNS

if TYPE_CHECKING:
    import pandera.errors
    import pandera.polars

Columns = dict[str, Any]
"""Column names in table order, each with its Polars type."""

FILTER_PREFIX = "filter_"
"""Prefix of the reasons given by a recipe's filters and limit; such a sample is not defective."""

DUPLICATE = "duplicate"
"""Reason given to copies of an image that is already in the dataset; such a sample is not defective."""

_MAX_FAILURES = 5
"""Maximum number of failing rows named in an error message."""

_MAX_FAILURE_CHARS = 160
"""Maximum length of one failing value in an error message."""

_POLARS_TYPES: dict[table_columns.DtypeName, type[pl.DataType]] = {
    "String": pl.String,
    "Int32": pl.Int32,
    "Int64": pl.Int64,
    "Float64": pl.Float64,
    "Boolean": pl.Boolean,
}

_ROW_NAMES: dict[str, list[str]] = {
    "diagnosis": ["sample_id", "variant"],
    "evaluation": ["run", "step", "strength", "prompt", "role", "concept", "seed", "scorer", "number"],
    "sweep": ["variant", "seed", "step"],
    "aspect_buckets": ["sample_id", "bucket"],
    "vae_latents": ["sample_id", "bucket", "flipped"],
    "text_embeddings": ["sample_id", "variant"],
    "rejected": ["sample_id", "stage"],
}


def row_names(asset: str) -> list[str]:
    """Return the columns that identify a row of `asset`; its table is unique in them and sorted by them."""
    return _ROW_NAMES.get(asset, ["sample_id"])


def _polars_types(columns: table_columns.DeclaredColumns) -> Columns:
    return {name: _POLARS_TYPES[column.dtype] for name, column in columns.items()}


_ALL_COLUMNS = {
    asset: {**columns, **OPTIONAL_COLUMNS.get(asset, {})}
    for asset, columns in (*ASSET_COLUMNS.items(), ("rejected", REJECTED_COLUMNS))
}

SCHEMAS: dict[str, Columns] = {asset: _polars_types(columns) for asset, columns in ASSET_COLUMNS.items()}
"""Column types of each asset's table."""

SIDE_INPUT_COLUMNS: dict[str, dict[str, Columns]] = {
    name: {asset: _polars_types(columns) for asset, columns in of_tables.items()}
    for name, of_tables in table_columns.SIDE_INPUT_COLUMNS.items()
}
"""Types of the columns that follow in recipes with side inputs: by side input, then by asset."""

REJECTED: Columns = _polars_types(REJECTED_COLUMNS)
"""Column types of the table of rejected samples."""

ASSETS = tuple(asset for asset in SCHEMAS if asset not in OPTIONAL_ASSETS)
"""Names of the assets that every recipe has, in graph order."""


@cache
def pandera_schema(asset: str) -> pandera.polars.DataFrameSchema:
    """Return the schema of `asset` (or "rejected"): ordered columns, types, nulls and unique rows."""
    # Pandera takes half a second and 40 MB to load, and only a table that violates its schema needs it.
    import pandera.polars as pa

    declared = _ALL_COLUMNS[asset]
    types = _polars_types(declared)
    columns = {
        name: pa.Column(**{**column._asdict(), "dtype": types[name]}) for name, column in declared.items()
    }
    return pa.DataFrameSchema(columns, name=asset, strict=True, ordered=True, unique=row_names(asset))


def columns_in(asset: str, table: pl.DataFrame) -> Columns:
    """Return the columns of `asset`, with the columns of side inputs that `table` has."""
    optional = _polars_types(OPTIONAL_COLUMNS[asset])
    return {**SCHEMAS[asset], **{name: kind for name, kind in optional.items() if name in table.columns}}


def selected(asset: str, table: pl.DataFrame, columns: Iterable[str] | None) -> pl.DataFrame:
    """Return these columns of a table of `asset`, or all; columns of side inputs may be missing."""
    if columns is None:
        return table
    optional = OPTIONAL_COLUMNS.get(asset, {})
    return table.select(name for name in columns if name in table.columns or name not in optional)


def has_defect() -> pl.Expr:
    """Return an expression over rejected rows: False for duplicates and for filtered samples."""
    return ~pl.col("reason").str.starts_with(FILTER_PREFIX) & (pl.col("reason") != DUPLICATE)


def empty(asset: str) -> pl.DataFrame:
    """Return a table of `asset` (or "rejected") without rows."""
    return pl.DataFrame(schema=_types(asset))


def frame(asset: str, rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Build a table of `asset` (or "rejected") from rows, sorted by `row_names`.

    Raises:
        TableError: A column is missing or has another type.
    """
    where = f"rows for {asset}"
    try:
        # Strict, because a silent cast would hide a wrong type until another stage reads the table.
        table = pl.DataFrame(rows, schema=_types(asset), strict=True)
    except (TypeError, ValueError, pl.exceptions.PolarsError) as err:
        raise _schema_error(asset, where, str(err)) from err
    return validated(asset, table, where).sort(row_names(asset))


def validated(asset: str, table: pl.DataFrame, where: str) -> pl.DataFrame:
    """Validate `table` against the Pandera schema of `asset` and return it.

    Args:
        asset: Name of the asset, or "rejected".
        table: Table to validate.
        where: Location of the table, for the error message.

    Raises:
        TableError: The table violates the schema; the message names the first failing rows.
    """
    if is_valid(asset, table):
        return table
    import pandera.errors

    try:
        return pandera_schema(asset).validate(table, lazy=True)
    except pandera.errors.SchemaErrors as err:
        raise _schema_error(asset, where, _failures(err)) from err


def is_valid(asset: str, table: pl.DataFrame, types: Mapping[str, pl.DataType] | None = None) -> bool:
    """Return whether `pandera_schema(asset)` accepts the table.

    For a table with only some of a file's columns, but all of `row_names`, `types` are the types of all
    columns of the file.
    """
    types = dict(table.schema if types is None else types)
    declared = {
        name: column for name, column in _ALL_COLUMNS[asset].items() if column.required or name in types
    }
    if list(types.items()) != list(_polars_types(declared).items()):
        return False
    for name in table.columns:
        values, column = table[name], declared[name]
        if not column.nullable and (
            values.has_nulls() or (values.dtype.is_float() and values.is_nan().any())
        ):
            return False

    # Tables are sorted, and most have one row per sample: comparing neighbours takes a fifth of the time.
    names = row_names(asset)
    first = table[names[0]]
    if (first.slice(1) > first.head(-1)).all():
        return True
    return table.select(names).n_unique() == len(table)


def _types(asset: str) -> Columns:
    return REJECTED if asset == "rejected" else SCHEMAS[asset]


def _failures(errors: pandera.errors.SchemaErrors) -> str:
    """Describe the first failures, one per line."""
    cases = errors.failure_cases
    lines: list[str] = []
    for case in cases.head(_MAX_FAILURES).iter_rows(named=True):
        row = "" if case["index"] is None else f" in row {case['index']}"
        value = str(case["failure_case"])[:_MAX_FAILURE_CHARS]
        lines.append(f"{case['column'] or 'table'}: check {case['check']} failed for {value}{row}")

    if len(cases) > _MAX_FAILURES:
        lines.append(f"and {len(cases) - _MAX_FAILURES:,} more")
    return "\n".join(lines)


def _schema_error(asset: str, where: str, detail: str) -> TableError:
    stage = "the stage it is named after" if asset == "rejected" else asset
    return TableError(
        f"the table does not match the schema of {asset}:\n{detail}",
        where=where,
        fix=f"delete the table and materialize {stage} again; if the error returns, report it as a bug",
    )
