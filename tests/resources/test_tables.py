"""Tables that Dagster writes and reads as the outputs and inputs of assets."""

from __future__ import annotations

import uuid
from pathlib import Path

import polars as pl
import pytest
from dagster import AssetKey, Failure, build_input_context, build_output_context

from pipeline.outputs.folder import OutputFolder
from pipeline.storage.addresses import Url
from pipeline.storage.needed_columns import NEEDED, needed_columns
from pipeline.storage.tables import SCHEMAS, SIDE_INPUT_COLUMNS, Tables, empty, frame, pandera_schema
from resources.tables import COLUMNS, TableIOManager


def test_an_input_has_the_columns_in_its_metadata_or_else_all(tmp_path: Path) -> None:
    values = {name: ["a"] if kind == pl.String else [1] for name, kind in SCHEMAS["text_embeddings"].items()}
    table = pl.DataFrame(values, schema=SCHEMAS["text_embeddings"])
    Tables(tmp_path).write("text_embeddings", table)
    manager, key = (
        TableIOManager({"demo": OutputFolder(tmp_path, tmp_path)}),
        AssetKey(["demo", "text_embeddings"]),
    )
    columns = needed_columns("trained_lora", "text_embeddings")
    assert columns is not None
    limited = build_input_context(asset_key=key, definition_metadata={COLUMNS: columns})
    optional = SIDE_INPUT_COLUMNS["references"]["text_embeddings"]
    assert manager.load_input(limited).equals(table.select(name for name in columns if name not in optional))
    assert manager.load_input(build_input_context(asset_key=key)).equals(table)


def test_a_missing_table_is_a_failure_with_a_fix(tmp_path: Path) -> None:
    context = build_input_context(asset_key=AssetKey(["demo", "raw_images"]))
    with pytest.raises(Failure) as failure:
        TableIOManager({"demo": OutputFolder(tmp_path, tmp_path)}).load_input(context)
    assert "raw_images" in str(failure.value.metadata["fix"].value)


def test_every_needed_column_is_in_the_schema_of_its_table() -> None:
    assert needed_columns("text_embeddings", "validated_dataset") is None
    for tables in NEEDED.values():
        for table, columns in tables.items():
            assert set(columns) < set(pandera_schema(table).columns)


def rejected_rows() -> pl.DataFrame:
    columns = empty("rejected").columns
    return frame("rejected", [dict.fromkeys(columns, "a"), dict.fromkeys(columns, "b")])


def test_an_output_is_written_and_its_file_and_number_of_rows_are_recorded(tmp_path: Path) -> None:
    context = build_output_context(asset_key=AssetKey(["demo", "rejected"]))
    TableIOManager({"demo": OutputFolder(tmp_path, tmp_path)}).handle_output(context, rejected_rows())
    assert Tables(tmp_path).read("rejected").equals(rejected_rows())
    metadata = {name: value.value for name, value in context.get_logged_metadata().items()}
    assert metadata == {"table": str(tmp_path / "tables" / "rejected.parquet"), "dagster/row_count": 2}


def test_a_table_at_an_address_is_uploaded_when_written_and_fetched_when_read(tmp_path: Path) -> None:
    address, key = Url(f"memory://{uuid.uuid4().hex}/out"), AssetKey(["demo", "rejected"])
    one, two = (TableIOManager({"demo": OutputFolder(address, tmp_path / name)}) for name in ("one", "two"))
    one.handle_output(build_output_context(asset_key=key), rejected_rows())
    assert two.load_input(build_input_context(asset_key=key)).equals(rejected_rows())
    one.handle_output(build_output_context(asset_key=key), rejected_rows().head(1))
    assert two.load_input(build_input_context(asset_key=key)).equals(rejected_rows().head(1))
