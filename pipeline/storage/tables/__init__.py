"""Parquet tables that the stages exchange: their schemas, and reading and writing them."""

from pipeline.storage.tables.parquet import Tables, content_digest, read_rows, write_rows
from pipeline.storage.tables.rows import table_of, usable_and_rejected
from pipeline.storage.tables.schemas import (
    ASSETS,
    DUPLICATE,
    FILTER_PREFIX,
    OPTIONAL_ASSETS,
    REJECTED,
    SCHEMAS,
    SIDE_INPUT_COLUMNS,
    Columns,
    columns_in,
    empty,
    frame,
    has_defect,
    pandera_schema,
    row_names,
    selected,
    validated,
)

__all__ = [
    "ASSETS",
    "DUPLICATE",
    "FILTER_PREFIX",
    "OPTIONAL_ASSETS",
    "REJECTED",
    "SCHEMAS",
    "SIDE_INPUT_COLUMNS",
    "Columns",
    "Tables",
    "columns_in",
    "content_digest",
    "empty",
    "frame",
    "has_defect",
    "pandera_schema",
    "read_rows",
    "row_names",
    "selected",
    "table_of",
    "usable_and_rejected",
    "validated",
    "write_rows",
]
