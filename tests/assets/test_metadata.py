"""The metadata and the data version of a materialization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from dagster import (
    AssetKey,
    AssetSelection,
    FloatMetadataValue,
    IntMetadataValue,
    MetadataValue,
    TableMetadataValue,
    materialize,
)
from PIL import Image

from assets.definitions import build_definitions
from assets.metadata import (
    content_version,
    git_commit,
    publish,
    report_metadata,
    table_metadata,
)
from assets.pictures import picture_metadata
from pipeline.escaping import markdown_text
from pipeline.recipe import Recipe
from pipeline.reporting.reports import StageResult, read_report
from pipeline.storage.tables import SCHEMAS, Tables, frame
from tests.small_recipe import small_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return small_recipe(tmp_path)


def row(**changes: Any) -> dict[str, Any]:
    """Return a row of raw_images with `changes` to empty texts and ones."""
    blank = {name: "" if kind == pl.String else 1 for name, kind in SCHEMAS["raw_images"].items()}
    return {**blank, "sample_id": "photos/a.jpg", **changes}


def result(rejected: list[dict[str, Any]], counts: dict[str, Any]) -> StageResult:
    table = frame("raw_images", [row()])
    return StageResult(table, frame("rejected", rejected), {"samples": 1, "seconds": 0.5, **counts})


def test_file_stats_do_not_change_the_data_version_and_content_does() -> None:
    version = content_version(frame("raw_images", [row()]))
    assert (
        content_version(frame("raw_images", [row(mtime_ns=9, ctime_ns=9, inode=9, scanned_ns=9)])) == version
    )
    assert content_version(frame("raw_images", [row(content_hash="bb")])) != version
    assert content_version(frame("raw_images", [row(width=21)])) != version


def test_another_training_run_changes_the_data_version_of_an_equal_table(recipe: Recipe) -> None:
    versions = [
        publish(recipe, "raw_images", result([], {"run": run})).data_version for run in ("a", "b", "a")
    ]
    assert versions[0] == versions[2] != versions[1]


def test_the_file_stats_of_a_cache_entry_do_not_change_the_data_version() -> None:
    one = pl.DataFrame({"key": ["k"], "entry_mtime_ns": [1], "entry_inode": [1], "entry_bytes": [5]})
    two = pl.DataFrame({"key": ["k"], "entry_mtime_ns": [2], "entry_inode": [3], "entry_bytes": [5]})
    assert content_version(one) == content_version(two)


def test_long_texts_become_markdown_and_numbers_in_tables_are_rounded() -> None:
    """The UI truncates a text at the edge of its column, and wraps Markdown."""
    note = "a *note* " * 20
    metadata = report_metadata({"note": note, "word": "cpu", "rows": [{"loss": 1.2134380499664}]})
    assert metadata["note"] == MetadataValue.md(markdown_text(note))
    assert metadata["word"] == MetadataValue.text("cpu")
    rows = metadata["rows"]
    assert isinstance(rows, TableMetadataValue)
    assert rows.records[0].data == {"loss": 1.21344}


def test_the_preview_has_only_the_columns_that_a_reader_needs(recipe: Recipe) -> None:
    values = row(path="a.jpg", content_hash="ab" * 32, mtime_ns=5, format="x" * 200)
    stage_result = StageResult(frame("raw_images", [values]), frame("rejected", []), {"samples": 1})
    rows = (publish(recipe, "raw_images", stage_result).metadata or {})["first_rows"]
    assert isinstance(rows, TableMetadataValue)
    (first,) = (record.data for record in rows.records)
    assert first["sample_id"] == "photos/a.jpg"
    assert not {"path", "content_hash", "mtime_ns"} & set(first)
    assert first["format"] == "x" * 48 + "…"


def test_publishing_writes_the_report_and_the_rejected_rows(recipe: Recipe) -> None:
    rejected = {"sample_id": "photos/b.jpg", "dataset": "photos", "path": "b.jpg", "stage": "raw_images"}
    why = {"reason": "empty_file", "detail": "0 bytes", "fix": "copy it again", "content_hash": None}
    counts = {"in": 2, "kept": 1, "rejected": 1}
    output = publish(recipe, "raw_images", result([{**rejected, **why}], counts))
    # The name shows later to which recipe the folder belongs.
    report = read_report(recipe.output_dir, "raw_images") or {}
    assert report.items() >= {**counts, "recipe": recipe.name}.items()
    assert Tables(recipe.output_dir).read_rejected("raw_images")["reason"].to_list() == ["empty_file"]
    funnel = output.metadata["rejected_by_reason"].value
    assert "in 2 → kept 1 → rejected 1" in str(funnel)
    assert "| `empty_file` | 1 |" in str(funnel)


def test_a_list_of_rows_becomes_a_table(recipe: Recipe) -> None:
    rows = [{"what": "found", "kind": "", "number": 2}, {"what": "kept", "kind": "", "number": 1}]
    metadata = publish(recipe, "raw_images", result([], {"funnel": rows})).metadata["funnel"]
    assert isinstance(metadata, TableMetadataValue)
    assert [record.data for record in metadata.records] == rows


def test_counters_become_numeric_metadata() -> None:
    metadata = report_metadata({"samples": 3, "seconds": 0.5, "sizes": {"a": 1}, "nothing": None})
    assert isinstance(metadata["samples"], IntMetadataValue)
    assert isinstance(metadata["seconds"], FloatMetadataValue)
    assert "nothing" not in metadata


def test_a_table_accepts_rows_with_missing_columns_and_values_of_any_type() -> None:
    value = table_metadata([{"a": 1, "b": None}, {"c": Path("x")}])
    assert isinstance(value, TableMetadataValue)
    assert [column.name for column in value.schema.columns] == ["a", "b", "c"]
    assert [dict(record.data) for record in value.records] == [
        {"a": 1, "b": "", "c": ""},
        {"a": "", "b": "", "c": "x"},
    ]


def test_the_ui_can_parse_tables_and_json_with_numbers_that_are_not_finite() -> None:
    nan, infinite = float("nan"), float("inf")
    report = {"loss": nan, "rows": [{"loss": nan, "step": 1}], "plan": {"norm": [infinite]}}
    metadata = report_metadata(report)
    rows = metadata["rows"]
    assert isinstance(rows, TableMetadataValue)
    assert rows.records[0].data == {"loss": "nan", "step": 1}
    assert metadata["plan"].value == {"norm": ["inf"]}
    assert isinstance(metadata["loss"], FloatMetadataValue), "Dagster's API returns null and the text"


def test_a_table_states_that_buckets_are_height_x_width() -> None:
    value = table_metadata([{"bucket": "64x48", "samples": 3}])
    assert [column.name for column in value.schema.columns] == ["bucket (height x width)", "samples"]
    assert value.records[0].data == {"bucket (height x width)": "64x48", "samples": 3}


def test_I18_markdown_in_names_is_escaped() -> None:
    text = markdown_text("a|b`c\n<script>[x](y)*")
    assert text == "a\\|`` b`c `` `<script>[x](y)*`"


def test_the_pictures_of_an_asset_come_first_in_its_metadata(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "sheet.jpg").write_bytes(b"jpeg")
    published = publish(
        recipe, "raw_images", result([], {}), pictures=picture_metadata(tmp_path / "pictures")
    )
    assert next(iter(published.metadata or {})) == "picture_sheet"
    assert "picture_sheet" not in (publish(recipe, "raw_images", result([], {})).metadata or {})


def test_a_picture_does_not_replace_a_number_of_the_same_name(recipe: Recipe, tmp_path: Path) -> None:
    """A contact sheet `kept.jpg` once took the place of the counter `kept`."""
    for name in ("kept", "samples"):
        (tmp_path / f"{name}.jpg").write_bytes(b"jpeg")
    pictures = picture_metadata(tmp_path)
    metadata = publish(recipe, "raw_images", result([], {"kept": 7}), pictures=pictures).metadata or {}
    assert (metadata["kept"], metadata["samples"]) == (IntMetadataValue(7), IntMetadataValue(1))


def test_short_values_come_before_long_ones_and_files_last(recipe: Recipe, tmp_path: Path) -> None:
    report = {
        "sizes": {"a": 1},
        "curve": [[0, 1.0], [1, 0.5]],
        "none": [],
        "worst": [{"a": 1}],
        "loss": 1 / 3,
    }
    materialization = publish(
        recipe, "raw_images", result([], report), files={"lora": MetadataValue.path(str(tmp_path))}
    )
    names = [
        "samples",
        "seconds",
        "loss",
        *(["git_commit"] if git_commit() else []),
        "sizes",
        "worst",
        "lora",
        "report",
        "first_rows",
    ]
    assert list(materialization.metadata or {}) == names
    assert (materialization.metadata or {})["loss"] == FloatMetadataValue(0.333333)
    assert isinstance((materialization.metadata or {})["worst"], TableMetadataValue)


def test_the_dataset_page_is_linked_from_both_assets(tmp_path: Path, tiny_sd: Path) -> None:
    (tmp_path / "data").mkdir()
    Image.new("RGB", (64, 48), "red").save(tmp_path / "data" / "rose.png")
    (tmp_path / "data" / "rose.txt").write_text("a red rose")
    recipe = small_recipe(tmp_path, model={"base": tiny_sd}, buckets={"resolution": 64, "step": 8})
    graph = build_definitions([recipe]).get_repository_def().asset_graph
    names = ["raw_images", "validated_dataset", "aspect_buckets"]
    selection = AssetSelection.assets(*(AssetKey(["flowers", name]) for name in names)).without_checks()
    result = materialize([*graph.assets_defs], selection=selection)

    page = tmp_path / "out" / "reports" / "dataset" / "index.html"
    assert "a red rose" in page.read_text("utf-8")
    for name in names[1:]:
        (event,) = result.asset_materializations_for_node(f"flowers__{name}")
        assert event.metadata["dataset_page"] == MetadataValue.path(str(page))
        assert "picture_kept" in event.metadata or name == "aspect_buckets"


@pytest.mark.parametrize("name", ["\x1b[2J", "\u202egnp", "\x85", "\x00"])
def test_control_characters_in_json_become_escapes(name: str) -> None:
    shown = name.encode("unicode_escape").decode()
    metadata = report_metadata({"names": [name, {name: [1, name]}], "by_name": {name: 2}})
    assert metadata["names"].value == [shown, {shown: [1, shown]}]
    assert metadata["by_name"].value == {shown: 2}
