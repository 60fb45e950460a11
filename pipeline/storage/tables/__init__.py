"""Parquet tables that the stages exchange: their schemas, and reading and writing them."""

from pipeline.storage.tables.parquet import Tables, content_digest, write_rows
from pipeline.storage.tables.schemas import (
    ASSETS,
    DUPLICATE,
    FILTER_PREFIX,
    REJECTED,
    SCHEMAS,
    Columns,
    empty,
    frame,
    has_defect,
    pandera_schema,
    row_names,
    validated,
)

__all__ = [
    "ASSETS",
    "DUPLICATE",
    "FILTER_PREFIX",
    "REJECTED",
    "SCHEMAS",
    "Columns",
    "Tables",
    "content_digest",
    "empty",
    "frame",
    "has_defect",
    "pandera_schema",
    "row_names",
    "validated",
    "write_rows",
]
