"""Pandera schemas accept exactly the tables that the stages exchange."""

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pandera.errors
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from pipeline.errors import TableError
from pipeline.storage.tables import (
    ASSETS,
    DUPLICATE,
    REJECTED,
    SCHEMAS,
    SIDE_INPUT_COLUMNS,
    empty,
    frame,
    pandera_schema,
    validated,
)
from pipeline.storage.tables.schemas import columns_in, has_defect, selected

VIOLATIONS: dict[str, Callable[[pl.DataFrame], pl.DataFrame]] = {
    "a missing column": lambda table: table.drop("path"),
    "an additional column": lambda table: table.with_columns(more=pl.lit(1)),
    "another column order": lambda table: table.select(reversed(table.columns)),
    "another type": lambda table: table.with_columns(pl.col("path").cast(pl.Categorical)),
    "a null": lambda table: table.with_columns(path=pl.lit(None, pl.String)),
    "a duplicate row": lambda table: pl.concat([table, table]),
}


def one_row(asset: str) -> pl.DataFrame:
    row = {name: "x" if kind == pl.String else 1 for name, kind in empty(asset).schema.items()}
    return pl.DataFrame([row], schema=empty(asset).schema)


@pytest.mark.parametrize("asset", [*ASSETS, "rejected"])
def test_a_table_that_matches_its_schema_is_returned_unchanged(asset: str) -> None:
    assert_frame_equal(validated(asset, one_row(asset), "a test"), one_row(asset))


@pytest.mark.parametrize("violation", VIOLATIONS)
@pytest.mark.parametrize("asset", [*ASSETS, "rejected"])
def test_a_table_that_violates_its_schema_is_an_error(asset: str, violation: str) -> None:
    with pytest.raises(TableError, match=f"schema of {asset}"):
        validated(asset, VIOLATIONS[violation](one_row(asset)), "a test")


@pytest.mark.parametrize("asset", ["validated_dataset", "aspect_buckets"])
def test_nan_is_an_error_in_a_column_of_floats(asset: str) -> None:
    floats = [name for name, kind in SCHEMAS[asset].items() if kind.is_float()]
    table = one_row(asset).with_columns(pl.lit(float("nan")).alias(name) for name in floats)
    with pytest.raises(TableError, match="NaN"):
        validated(asset, table, "a test")


@pytest.mark.parametrize("asset", [*ASSETS, "rejected"])
def test_tables_are_valid_exactly_if_the_pandera_schema_accepts_them(asset: str) -> None:
    names = list(pandera_schema(asset).columns)
    types = {name: column.dtype.type for name, column in pandera_schema(asset).columns.items()}
    values = pl.DataFrame({name: "x" if types[name] == pl.String else 1 for name in names})
    complete = values.cast(types)
    floats = [name for name in names if types[name].is_float()]
    tables = [
        *(complete, complete.clear(), one_row(asset), complete.select(reversed(names))),
        *(complete.with_columns(pl.lit(None, types[name]).alias(name)) for name in names),
        *(complete.drop(name) for name in names),
        *(complete.with_columns(pl.lit(1, pl.Int16).alias(name)) for name in names),
        *(complete.with_columns(pl.lit(float("nan")).alias(name)) for name in floats),
        # The equal rows are not neighbours.
        pl.concat([complete, complete.with_columns(sample_id=pl.lit("y")), complete]),
    ]
    for table in tables:
        try:
            pandera_schema(asset).validate(table, lazy=True)
        except pandera.errors.SchemaErrors:
            with pytest.raises(TableError):
                validated(asset, table, "a test")
        else:
            assert_frame_equal(validated(asset, table, "a test"), table)


def test_a_valid_table_does_not_load_pandera() -> None:
    code = """
import sys
from pipeline.storage.tables import empty, validated
validated("raw_images", empty("raw_images"), "a test")
assert "pandera" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_error_names_column_row_and_table_and_counts_further_failures() -> None:
    rows = [{"variant": index} for index in range(9)]
    table = pl.concat([one_row("text_embeddings").with_columns(**row) for row in rows])
    table = table.cast(SCHEMAS["text_embeddings"]).with_columns(caption=pl.lit(None, pl.String))
    with pytest.raises(TableError) as excinfo:
        validated("text_embeddings", table, "out/tables/text_embeddings.parquet")
    assert "caption: check not_nullable failed for None in row 0" in excinfo.value.what
    assert "and 4 more" in excinfo.value.what
    assert excinfo.value.where == "out/tables/text_embeddings.parquet"
    assert "materialize text_embeddings again" in excinfo.value.fix


def test_every_column_has_a_description() -> None:
    for asset in (*ASSETS, "rejected"):
        for name, column in pandera_schema(asset).columns.items():
            assert column.description, f"{asset}.{name}"


def test_two_rows_of_one_sample_are_an_error() -> None:
    row = dict.fromkeys(SCHEMAS["text_embeddings"], 1) | {
        name: "same" for name, kind in SCHEMAS["text_embeddings"].items() if kind == pl.String
    }
    with pytest.raises(TableError, match="same"):
        frame("text_embeddings", [row, row])


def test_a_row_with_a_null_or_a_wrong_type_is_an_error() -> None:
    with pytest.raises(TableError):
        frame("rejected", [dict.fromkeys(REJECTED, "x") | {"reason": None}])
    with pytest.raises(TableError):
        frame("trained_lora", [dict.fromkeys(SCHEMAS["trained_lora"], "x")])


def test_rows_become_a_table_sorted_by_the_columns_that_identify_a_row() -> None:
    values: dict[str, Any] = one_row("vae_latents").row(0, named=True)
    names = [("b", "512x512", False), ("a", "512x512", True), ("a", "512x512", False), ("a", "256x256", True)]
    rows = [
        values | {"sample_id": sample_id, "bucket": bucket, "flipped": mirrored}
        for sample_id, bucket, mirrored in names
    ]
    table = frame("vae_latents", rows)
    assert table.select("sample_id", "bucket", "flipped").rows() == sorted(names)


def test_duplicates_and_filtered_samples_have_no_defect() -> None:
    rejected = pl.DataFrame({"reason": ["empty_file", DUPLICATE, "filter_limit", "undecodable"]})
    assert rejected.filter(has_defect())["reason"].to_list() == ["empty_file", "undecodable"]


def test_an_error_shows_at_most_five_failures_and_160_characters_of_a_value() -> None:
    for num_failures, has_more in ((5, False), (6, True)):
        table = pl.concat(
            [one_row("rejected").with_columns(sample_id=pl.lit(str(row))) for row in range(num_failures)]
        )
        with pytest.raises(TableError) as excinfo:
            validated("rejected", table.with_columns(reason=pl.lit(None, pl.String)), "a test")
        lines = excinfo.value.what.splitlines()
        assert sum("not_nullable failed" in line for line in lines) == 5
        assert ("and 1 more" in lines[-1]) == has_more

    long = pl.concat([one_row("raw_images").with_columns(sample_id=pl.lit("y" * 500))] * 2)
    with pytest.raises(TableError) as excinfo:
        validated("raw_images", long, "a test")
    values = re.findall("failed for (.*) in row", excinfo.value.what)
    assert [len(value) for value in values] == [160, 160]


def test_an_error_without_a_row_names_none() -> None:
    with pytest.raises(TableError) as excinfo:
        validated("rejected", one_row("rejected").drop("fix"), "a test")
    assert "in row" not in excinfo.value.what


@pytest.mark.parametrize(
    ("asset", "fix"),
    [
        ("raw_images", "materialize raw_images again"),
        ("rejected", "materialize the stage it is named after again"),
    ],
)
def test_the_fix_of_a_wrong_table_names_the_asset_that_writes_it(asset: str, fix: str) -> None:
    with pytest.raises(TableError) as excinfo:
        validated(asset, one_row(asset).drop("path"), "a test")
    assert fix in excinfo.value.fix


OPTIONAL = {
    asset: {**SIDE_INPUT_COLUMNS["masks"].get(asset, {}), **SIDE_INPUT_COLUMNS["references"].get(asset, {})}
    for asset in ASSETS
}


@pytest.mark.parametrize("asset", [asset for asset, columns in OPTIONAL.items() if columns])
def test_columns_of_masks_and_references_may_follow_and_may_be_null(asset: str) -> None:
    nulls = one_row(asset).with_columns(
        pl.lit(None, kind).alias(name) for name, kind in OPTIONAL[asset].items()
    )
    assert_frame_equal(validated(asset, nulls, "a test"), nulls)
    for name in OPTIONAL[asset]:
        assert_frame_equal(validated(asset, nulls.drop(name), "a test"), nulls.drop(name))
        assert columns_in(asset, one_row(asset).with_columns(nulls[name])) == {
            **SCHEMAS[asset],
            name: OPTIONAL[asset][name],
        }


def test_selected_columns_may_lack_those_of_masks_and_references_and_no_others() -> None:
    table = one_row("vae_latents")
    assert selected("vae_latents", table, None).columns == table.columns
    assert selected("vae_latents", table, ["key", "mask_key"]).columns == ["key"]
    with_mask = table.with_columns(mask_key=pl.lit("k"))
    assert selected("vae_latents", with_mask, ["mask_key", "key"]).columns == ["mask_key", "key"]
    with pytest.raises(pl.exceptions.ColumnNotFoundError):
        selected("vae_latents", table, ["key", "caption"])


@pytest.mark.parametrize("height", ["x", 2**40, {}], ids=str)
def test_rows_with_a_value_of_another_type_are_a_table_error(height: object) -> None:
    values = one_row("raw_images").row(0, named=True)
    assert frame("raw_images", [values]).height == 1
    with pytest.raises(TableError, match="schema of raw_images"):
        frame("raw_images", [values | {"height": height}])


def test_the_schema_of_a_table_has_its_name() -> None:
    assert {asset: pandera_schema(asset).name for asset in ASSETS} == {asset: asset for asset in ASSETS}
