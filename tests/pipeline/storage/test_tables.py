"""Tables are read and written whole, in their schema, sorted by sample_id."""

import hashlib
import threading
from pathlib import Path
from typing import Any

import pandera.errors
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from pipeline.errors import TableError
from pipeline.storage.atomic import write_through
from pipeline.storage.tables import (
    ASSETS,
    SCHEMAS,
    Tables,
    content_digest,
    empty,
    frame,
    in_order,
    pandera_schema,
    validated,
    without,
)

VALUES = {
    pl.String: st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    pl.Int32: st.integers(-(2**31), 2**31 - 1),
    pl.Int64: st.integers(-(2**63), 2**63 - 1),
    pl.Boolean: st.booleans(),
    pl.Float64: st.floats(allow_nan=False),
}


def rows_of(asset: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    row = st.fixed_dictionaries({name: VALUES[kind] for name, kind in SCHEMAS[asset].items()})
    return st.lists(row, max_size=8, unique_by=lambda made: made["sample_id"])


def rejection(sample_id: str, stage: str, content_hash: str | None = None) -> dict[str, Any]:
    return {
        "sample_id": sample_id,
        "dataset": "d",
        "path": "p",
        "stage": stage,
        "reason": "empty_file",
        "detail": "0 bytes",
        "fix": "delete it",
        "content_hash": content_hash,
    }


@pytest.mark.parametrize("asset", ASSETS)
@settings(max_examples=15)
@given(data=st.data())
def test_what_is_written_is_read_back_in_the_order_of_sample_id(
    asset: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tables = Tables(tmp_path_factory.mktemp("out"))
    table = pl.DataFrame(data.draw(rows_of(asset)), schema=SCHEMAS[asset])
    tables.write(asset, table)
    assert_frame_equal(tables.read(asset), table.sort("sample_id"))


@pytest.mark.parametrize("names", [["bucket", "sample_id", "scale"], ["scale"]])
def test_some_columns_are_read_as_of_the_whole_table(tmp_path: Path, names: list[str]) -> None:
    tables = Tables(tmp_path)
    row = {name: "x" if kind == pl.String else 1 for name, kind in SCHEMAS["aspect_buckets"].items()}
    rows = [row | {"bucket": "b"}, row | {"bucket": "a"}]
    table = pl.DataFrame(rows, schema=SCHEMAS["aspect_buckets"])
    tables.write("aspect_buckets", table)
    assert_frame_equal(tables.read("aspect_buckets", names), table.reverse().select(names))
    with pytest.raises(TableError, match="no table of raw_images"):
        tables.read("raw_images", ["sample_id"])
    spoiled = {
        "a column more": table.with_columns(more=1),
        "another order": table.select(reversed(table.columns)),
        "another type": table.with_columns(pl.col("width").cast(pl.Int64)),
        "a null": table.with_columns(scale=pl.lit(None, dtype=pl.Float64)),
        "a row twice": pl.concat([table, table]),
    }
    for wrong in spoiled.values():
        wrong.write_parquet(tables.path("aspect_buckets"))
        with pytest.raises(TableError, match="no table of aspect_buckets"):
            tables.read("aspect_buckets", names)
    tables.path("aspect_buckets").write_bytes(b"PAR1")
    with pytest.raises(TableError, match="cannot be read"):
        tables.read("aspect_buckets", names)


def test_a_missing_table_names_its_path_and_the_job_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="no table of vae_latents") as caught:
        Tables(tmp_path).read("vae_latents")
    assert "vae_latents.parquet" in caught.value.where
    assert "_cache" in caught.value.fix


def test_L06_a_torn_table_is_an_error_that_names_the_file_and_is_no_memory(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    path = tables.write("aspect_buckets", empty("aspect_buckets"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TableError) as caught:
        tables.read("aspect_buckets")
    assert str(path) in str(caught.value)
    assert tables.read_previous("aspect_buckets") is None


def test_a_table_of_another_schema_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    with pytest.raises(TableError, match="aspect_buckets"):
        tables.write("aspect_buckets", empty("raw_images"))
    assert not tables.folder.exists()


def test_two_rows_of_one_sample_are_refused(tmp_path: Path) -> None:
    row = dict.fromkeys(SCHEMAS["text_embeddings"], 1) | {
        name: "same" for name, kind in SCHEMAS["text_embeddings"].items() if kind == pl.String
    }
    with pytest.raises(TableError, match="same"):
        Tables(tmp_path).write("text_embeddings", frame("text_embeddings", [row, row]))


def test_a_row_with_a_missing_column_or_a_wrong_type_is_an_error() -> None:
    with pytest.raises(TableError):
        frame("rejected", [rejection("d/a", "raw_images") | {"reason": None}])
    with pytest.raises(TableError):
        frame("trained_lora", [dict.fromkeys(SCHEMAS["trained_lora"], "x")])


def test_each_stage_owns_its_rejected_rows(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    tables.write_rejected("raw_images", frame("rejected", [rejection("d/a", "raw_images")]))
    tables.write_rejected("vae_latents", frame("rejected", [rejection("d/b", "vae_latents", "ff")]))
    tables.write_rejected("raw_images", frame("rejected", [rejection("d/c", "raw_images")]))
    assert sorted(tables.read_rejected()["sample_id"]) == ["d/b", "d/c"]
    assert tables.read_rejected("vae_latents")["sample_id"].to_list() == ["d/b"]


def test_O07_stages_that_reject_at_the_same_time_do_not_undo_each_other(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    barrier = threading.Barrier(len(ASSETS))

    def reject(stage: str) -> None:
        barrier.wait()
        for _ in range(20):
            tables.write_rejected(stage, frame("rejected", [rejection("d/" + stage, stage)]))

    threads = [threading.Thread(target=reject, args=(stage,)) for stage in ASSETS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tables.read_rejected()["stage"]) == sorted(ASSETS)


def test_O07_a_stage_that_composes_what_it_read_before_another_wrote_does_so_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, other = Tables(tmp_path), Tables(tmp_path)
    composing: list[Path] = []

    def write_late(path: Path, content: Any) -> None:
        if path == tables.path("rejected") and not composing:
            composing.append(path)
            other.write_rejected("vae_latents", frame("rejected", [rejection("d/b", "vae_latents")]))
        write_through(path, content)

    monkeypatch.setattr("pipeline.storage.tables.write_through", write_late)
    tables.write_rejected("raw_images", frame("rejected", [rejection("d/a", "raw_images")]))
    assert sorted(tables.read("rejected")["sample_id"]) == ["d/a", "d/b"]


def test_O07_the_rows_of_a_stage_are_its_own_whatever_was_composed(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    for name, stage in (("d/a", "raw_images"), ("d/b", "vae_latents")):
        tables.write_rejected(stage, frame("rejected", [rejection(name, stage)]))
    tables.write("rejected", tables.read_rejected("raw_images"))
    assert tables.read_rejected("vae_latents")["sample_id"].to_list() == ["d/b"]
    assert sorted(tables.read_rejected()["sample_id"]) == ["d/a", "d/b"]
    assert tables.read_rejected("text_embeddings").is_empty()


def test_L06_torn_rows_of_a_stage_are_an_error_that_says_what_makes_them_anew(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    tables.write_rejected("raw_images", frame("rejected", [rejection("d/a", "raw_images")]))
    part = tables.folder / "rejected" / "raw_images.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    for call in (tables.read_rejected, lambda: tables.write_rejected("vae_latents", empty("rejected"))):
        with pytest.raises(TableError, match="materialize raw_images again") as caught:
            call()
        assert caught.value.where == str(part)


SPOILED = {
    "nothing": lambda table: table,
    "a column less": lambda table: table.drop("path"),
    "a column more": lambda table: table.with_columns(more=pl.lit(1)),
    "another order": lambda table: table.select(reversed(table.columns)),
    "another type": lambda table: table.with_columns(pl.col("path").cast(pl.Categorical)),
    "a null": lambda table: table.with_columns(path=pl.lit(None, pl.String)),
    "a row twice": lambda table: pl.concat([table, table]),
    "no number": lambda table: table.with_columns(
        *(pl.lit(float("nan")).alias(name) for name, kind in table.schema.items() if kind.is_float())
    ),
}


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize("asset", [*ASSETS, "rejected"])
def test_the_cheap_look_at_a_table_agrees_with_its_pandera_schema(asset: str, spoiled: str) -> None:
    row = {name: "x" if kind == pl.String else 1 for name, kind in empty(asset).schema.items()}
    table = SPOILED[spoiled](pl.DataFrame([row], schema=empty(asset).schema))
    try:
        pandera_schema(asset).validate(table, lazy=True)
    except pandera.errors.SchemaErrors:
        with pytest.raises(TableError):
            validated(asset, table, "a test")
    else:
        assert_frame_equal(validated(asset, table, "a test"), table)


def test_the_rows_of_no_others_are_the_table_itself_and_those_of_all_are_none() -> None:
    rows = pl.DataFrame({"sample_id": ["b", "a", "c", "a"], "more": [1, 2, 3, 4]})
    assert without(rows, rows[:0]) is rows
    assert without(rows, rows).equals(rows[:0])
    assert without(rows, rows[1:2]).rows() == [("b", 1), ("c", 3)]


def test_a_table_in_order_is_itself_and_another_is_sorted_by_all_its_names() -> None:
    rows = pl.DataFrame({"a": ["x", "x", "y"], "b": [1, 2, 0]})
    assert in_order(rows, ["a", "b"]) is rows
    for mixed in (rows.reverse(), rows[[1, 0, 2]], rows[[0, 2, 1]]):
        assert in_order(mixed, ["a", "b"]).equals(rows)
    assert in_order(rows[:0], ["a"]).is_empty()
    assert in_order(rows[:1], ["a", "b"]).equals(rows[:1])


def test_a_digest_is_over_the_tables_as_text_however_many_rows_are_text_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = range(23)
    table = pl.DataFrame({"a": [f"x{each}, {each}" for each in numbers], "b": [each / 3 for each in numbers]})
    whole = hashlib.sha256((table.write_csv() + table.clear().write_csv() + "run").encode()).hexdigest()
    for number in (1, 5, 23, 100):
        monkeypatch.setattr("pipeline.storage.tables._ROWS_AT_ONCE", number)
        assert content_digest(table, table.clear(), more="run") == whole
