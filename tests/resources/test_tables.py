from __future__ import annotations

from pathlib import Path

import polars as pl
from dagster import AssetKey, build_input_context

from pipeline.storage.needed_columns import NEEDED, needed_columns
from pipeline.storage.tables import SCHEMAS, Tables
from resources.tables import COLUMNS, TableIOManager


def test_of_a_table_those_columns_are_read_that_the_stage_needs_and_else_all(tmp_path: Path) -> None:
    values = {name: ["a"] if kind == pl.String else [1] for name, kind in SCHEMAS["text_embeddings"].items()}
    table = pl.DataFrame(values, schema=SCHEMAS["text_embeddings"])
    Tables(tmp_path).write("text_embeddings", table)
    manager, key = TableIOManager({"demo": tmp_path}), AssetKey(["demo", "text_embeddings"])
    needed = needed_columns("trained_lora", "text_embeddings")
    assert needed is not None
    some = build_input_context(asset_key=key, definition_metadata={COLUMNS: needed})
    assert manager.load_input(some).equals(table.select(needed))
    assert manager.load_input(build_input_context(asset_key=key)).equals(table)


def test_what_is_needed_of_a_table_is_in_it() -> None:
    assert needed_columns("text_embeddings", "validated_dataset") is None
    for tables in NEEDED.values():
        for table, columns in tables.items():
            assert set(columns) < set(SCHEMAS[table])
