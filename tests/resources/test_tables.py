"""Tables that Dagster writes and reads as the outputs and inputs of assets."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from dagster import AssetKey, Failure, build_input_context

from pipeline.storage.needed_columns import NEEDED, needed_columns
from pipeline.storage.tables import MASK_COLUMNS, REFERENCE_COLUMNS, SCHEMAS, Tables
from resources.tables import COLUMNS, TableIOManager


def test_an_input_has_the_columns_in_its_metadata_or_else_all(tmp_path: Path) -> None:
    values = {name: ["a"] if kind == pl.String else [1] for name, kind in SCHEMAS["text_embeddings"].items()}
    table = pl.DataFrame(values, schema=SCHEMAS["text_embeddings"])
    Tables(tmp_path).write("text_embeddings", table)
    manager, key = TableIOManager({"demo": tmp_path}), AssetKey(["demo", "text_embeddings"])
    columns = needed_columns("trained_lora", "text_embeddings")
    assert columns is not None
    limited = build_input_context(asset_key=key, definition_metadata={COLUMNS: columns})
    optional = REFERENCE_COLUMNS["text_embeddings"]
    assert manager.load_input(limited).equals(table.select(name for name in columns if name not in optional))
    assert manager.load_input(build_input_context(asset_key=key)).equals(table)


def test_a_missing_table_is_a_failure_with_a_fix(tmp_path: Path) -> None:
    context = build_input_context(asset_key=AssetKey(["demo", "raw_images"]))
    with pytest.raises(Failure) as failure:
        TableIOManager({"demo": tmp_path}).load_input(context)
    assert "raw_images" in str(failure.value.metadata["fix"].value)


def test_every_needed_column_is_in_the_schema_of_its_table() -> None:
    assert needed_columns("text_embeddings", "validated_dataset") is None
    for tables in NEEDED.values():
        for table, columns in tables.items():
            optional = {*MASK_COLUMNS.get(table, {}), *REFERENCE_COLUMNS.get(table, {})}
            assert set(columns) < {*SCHEMAS[table], *optional}
