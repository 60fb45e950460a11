"""Parquet tables that the stages exchange: their schemas, and reading and writing them."""

from pipeline.storage.tables.parquet import Tables, content_digest, write_rows
from pipeline.storage.tables.schemas import (
    ASKED_FOR,
    ASSETS,
    DUPLICATE,
    REJECTED,
    SCHEMAS,
    Columns,
    empty,
    frame,
    in_order,
    not_asked_for,
    only,
    pandera_schema,
    row_names,
    validated,
    without,
)

__all__ = [
    "ASKED_FOR",
    "ASSETS",
    "DUPLICATE",
    "REJECTED",
    "SCHEMAS",
    "Columns",
    "Tables",
    "content_digest",
    "empty",
    "frame",
    "in_order",
    "not_asked_for",
    "only",
    "pandera_schema",
    "row_names",
    "validated",
    "without",
    "write_rows",
]
