"""Tables are validated, sorted by the columns that identify a row, and replaced atomically."""

import hashlib
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from pipeline.errors import TableError
from pipeline.storage.atomic import write_atomically
from pipeline.storage.tables import (
    ASSETS,
    SCHEMAS,
    Tables,
    content_digest,
    empty,
    frame,
    read_rows,
    write_rows,
)
from tests.damage import DAMAGES

VALUES = {
    pl.String: st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    pl.Int32: st.integers(-(2**31), 2**31 - 1),
    pl.Int64: st.integers(-(2**63), 2**63 - 1),
    pl.Boolean: st.booleans(),
    pl.Float64: st.floats(allow_nan=False),
}


def rows_of(asset: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    row = st.fixed_dictionaries({name: VALUES[kind] for name, kind in SCHEMAS[asset].items()})
    return st.lists(row, max_size=8, unique_by=lambda values: values["sample_id"])


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
def test_a_written_table_is_read_back_sorted_by_sample_id(
    asset: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tables = Tables(tmp_path_factory.mktemp("out"))
    table = pl.DataFrame(data.draw(rows_of(asset)), schema=SCHEMAS[asset])
    tables.write(asset, table)
    assert_frame_equal(tables.read(asset), table.sort("sample_id"))


@pytest.mark.parametrize("names", [["bucket", "sample_id", "scale"], ["scale"]], ids=str)
def test_a_subset_of_columns_is_read_only_from_a_valid_table(tmp_path: Path, names: list[str]) -> None:
    tables = Tables(tmp_path)
    row = {name: "x" if kind == pl.String else 1 for name, kind in SCHEMAS["aspect_buckets"].items()}
    rows = [row | {"bucket": "b"}, row | {"bucket": "a"}]
    table = pl.DataFrame(rows, schema=SCHEMAS["aspect_buckets"])
    tables.write("aspect_buckets", table)
    assert_frame_equal(tables.read("aspect_buckets", names), table.reverse().select(names))

    with pytest.raises(TableError, match="table of raw_images does not exist"):
        tables.read("raw_images", ["sample_id"])

    violations = {
        "an additional column": table.with_columns(more=1),
        "another column order": table.select(reversed(table.columns)),
        "another type": table.with_columns(pl.col("width").cast(pl.Int64)),
        "a null": table.with_columns(scale=pl.lit(None, dtype=pl.Float64)),
        "duplicate rows": pl.concat([table, table]),
    }
    for wrong in violations.values():
        wrong.write_parquet(tables.path("aspect_buckets"))
        with pytest.raises(TableError, match="schema of aspect_buckets"):
            tables.read("aspect_buckets", names)

    tables.path("aspect_buckets").write_bytes(b"PAR1")
    with pytest.raises(TableError, match="cannot be read"):
        tables.read("aspect_buckets", names)


def test_columns_of_masks_are_optional_in_tables_and_when_they_are_read(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    blank = {name: "a" if kind == pl.String else 1 for name, kind in SCHEMAS["aspect_buckets"].items()}
    plain = frame("aspect_buckets", [{**blank, "crop_loss": 0.0, "scale": 1.0}])
    columns = ["sample_id", "mask_hash"]
    tables.write("aspect_buckets", plain)
    assert tables.read("aspect_buckets", columns).columns == ["sample_id"]
    masked = plain.with_columns(
        mask_path=pl.lit("m.png"), mask_hash=pl.lit("b"), mask_mean=pl.lit(None, pl.Float64)
    )
    tables.write("aspect_buckets", masked)
    assert tables.read("aspect_buckets", columns).rows() == [("a", "b")]
    with pytest.raises(TableError):
        tables.write("aspect_buckets", plain.with_columns(mask_colour=pl.lit("red")))


def test_the_error_about_a_missing_table_names_its_path_and_the_job_that_creates_it(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="table of vae_latents does not exist") as excinfo:
        Tables(tmp_path).read("vae_latents")
    assert "vae_latents.parquet" in excinfo.value.where
    assert "latentline run <recipe> --cache-only" in excinfo.value.fix


def test_L06_a_truncated_table_is_an_error_with_its_path_and_never_a_previous_table(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    path = tables.write("aspect_buckets", empty("aspect_buckets"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TableError) as excinfo:
        tables.read("aspect_buckets")
    assert str(path) in str(excinfo.value)
    assert tables.read_previous("aspect_buckets") is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_of_an_earlier_run_is_named_and_a_missing_one_is_not(
    tmp_path: Path, damage: str
) -> None:
    lines: list[str] = []
    tables = Tables(tmp_path, log=lines.append)
    assert tables.read_previous("vae_latents") is None
    tables.write_rejected("validated_dataset", frame("rejected", [rejection("d/a", "validated_dataset")]))
    tables.write("vae_latents", empty("vae_latents"))
    assert tables.read_previous("vae_latents") is not None
    assert lines == []

    paths = [tables.path("vae_latents"), tables.folder / "rejected" / "validated_dataset.parquet"]
    for path in paths:
        DAMAGES[damage](path)
    for _ in range(2):
        assert tables.read_previous("vae_latents") is None
        tables.write_rejected("raw_images", empty("rejected"))
    for line, path in zip(lines, paths, strict=True):
        assert line.startswith("warning: the table cannot be read: ")
        assert line.endswith(f" ({path}); the file counts as missing, and jobs compute its rows again")


def test_a_table_of_another_schema_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    with pytest.raises(TableError, match="aspect_buckets"):
        tables.write("aspect_buckets", empty("raw_images"))
    assert not tables.folder.exists()


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
        for _ in range(3):
            tables.write_rejected(stage, frame("rejected", [rejection("d/" + stage, stage)]))

    threads = [threading.Thread(target=reject, args=(stage,)) for stage in ASSETS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tables.read_rejected()["stage"]) == sorted(ASSETS)


def test_O07_rejected_rows_are_rebuilt_if_another_stage_wrote_its_own_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, other = Tables(tmp_path), Tables(tmp_path)
    rebuilt: list[Path] = []

    def write_late(path: Path, content: Any) -> None:
        if path == tables.path("rejected") and not rebuilt:
            rebuilt.append(path)
            other.write_rejected("vae_latents", frame("rejected", [rejection("d/b", "vae_latents")]))
        write_atomically(path, content)

    monkeypatch.setattr("pipeline.storage.tables.parquet.write_atomically", write_late)
    tables.write_rejected("raw_images", frame("rejected", [rejection("d/a", "raw_images")]))
    assert sorted(tables.read("rejected")["sample_id"]) == ["d/a", "d/b"]


def test_O07_the_rows_of_a_stage_do_not_depend_on_the_combined_table(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    for name, stage in (("d/a", "raw_images"), ("d/b", "vae_latents")):
        tables.write_rejected(stage, frame("rejected", [rejection(name, stage)]))
    tables.write("rejected", tables.read_rejected("raw_images"))
    assert tables.read_rejected("vae_latents")["sample_id"].to_list() == ["d/b"]
    assert sorted(tables.read_rejected()["sample_id"]) == ["d/a", "d/b"]
    assert tables.read_rejected("text_embeddings").is_empty()


def test_L06_truncated_rejected_rows_are_an_error_that_names_the_stage_to_repeat(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    tables.write_rejected("raw_images", frame("rejected", [rejection("d/a", "raw_images")]))
    part = tables.folder / "rejected" / "raw_images.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(TableError, match="materialize raw_images again") as excinfo:
        tables.read_rejected()
    assert excinfo.value.where == str(part)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("damaged", ["validated_dataset", "text_embeddings", "trained_lora"])
def test_damaged_rejected_rows_of_a_stage_do_not_stop_the_stages_before_it(
    tmp_path: Path, damage: str, damaged: str
) -> None:
    tables = Tables(tmp_path)
    tables.write_rejected(damaged, frame("rejected", [rejection("d/a", damaged)]))
    DAMAGES[damage](tables.folder / "rejected" / f"{damaged}.parquet")
    tables.write_rejected("raw_images", frame("rejected", [rejection("d/b", "raw_images")]))
    assert "d/b" in tables.read("rejected")["sample_id"]
    tables.write_rejected(damaged, frame("rejected", [rejection("d/a", damaged)]))
    assert sorted(tables.read("rejected")["sample_id"]) == ["d/a", "d/b"]


def test_L10_a_table_that_another_process_replaces_is_read_as_one_of_the_two(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    versions = {rows: pl.DataFrame({"n": [rows] * rows, "text": ["x" * rows] * rows}) for rows in (7, 700)}
    stop = threading.Event()

    def replace_often() -> None:
        while not stop.is_set():
            for table in versions.values():
                write_atomically(path, partial(write_rows, table))

    write_atomically(path, partial(write_rows, versions[7]))
    writer = threading.Thread(target=replace_often)
    writer.start()
    try:
        seen = [read_rows(path) for _ in range(400)]
    finally:
        stop.set()
        writer.join()
    assert {len(table) for table in seen} == set(versions)
    for table in seen:
        assert_frame_equal(table, versions[len(table)])


def numbered(number: int) -> pl.DataFrame:
    names = [f"photos/{each}.jpg" for each in range(number)]
    return pl.DataFrame(
        {
            "sample_id": names,
            "caption": [f"a photograph of cat {each * each}" for each in range(number)],
            "height": pl.Series(range(number), dtype=pl.Int32),
            "stats": [[each, None, -1] for each in range(number)],
        },
        schema_overrides={"sample_id": pl.String, "caption": pl.String, "stats": pl.List(pl.Int64)},
    )


@pytest.mark.parametrize("number", [0, 3, 20_000])
def test_L07_no_flipped_bit_of_a_table_is_read_as_other_rows(tmp_path: Path, number: int) -> None:
    """Without the hash, most flipped bits gave other rows, and some in the footer ended the process."""
    path, table = tmp_path / "table.parquet", numbered(number)
    write_atomically(path, partial(write_rows, table))
    assert_frame_equal(read_rows(path), table)
    good = path.read_bytes()
    randomness = random.Random(0)
    # The last bytes are the footer.
    places = [randomness.randrange(len(good)) for _ in range(100)]
    places += [randomness.randrange(max(0, len(good) - 1_500), len(good)) for _ in range(100)]
    num_errors = 0
    for place in places:
        damaged = bytearray(good)
        damaged[place] ^= 1 << randomness.randrange(8)
        path.write_bytes(damaged)
        try:
            # Without the name of the hash, a table counts as one of an earlier release.
            assert read_rows(path).equals(table)
        except pl.exceptions.PolarsError:
            num_errors += 1
    assert num_errors > 150


def test_L07_a_table_with_another_caption_of_the_same_length_is_an_error(tmp_path: Path) -> None:
    """As uncompressed files of other programs: valid Parquet, one letter changed."""
    tables, path = Tables(tmp_path), tmp_path / "tables" / "raw_images.parquet"
    row = {name: "aaaaaaaa" if kind == pl.String else 1 for name, kind in SCHEMAS["raw_images"].items()}
    tables.write("raw_images", frame("raw_images", [row]))
    good = path.read_bytes()
    path.write_bytes(good.replace(b"aaaaaaaa", b"aaaabaaa", 1))
    with pytest.raises(TableError, match="changed after it was written") as raised:
        tables.read("raw_images", ["sample_id"])
    assert raised.value.fix == "delete the file and materialize raw_images again"
    assert tables.read_previous("raw_images") is None


def test_tables_of_earlier_releases_have_no_hash_and_are_read(tmp_path: Path) -> None:
    path, table = tmp_path / "table.parquet", numbered(50)
    table.write_parquet(path, compression_level=1)
    assert_frame_equal(read_rows(path), table)


def test_L07_the_hash_is_found_wherever_polars_parts_the_footer(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    for length in range(1, 20_000, 97):
        table = pl.DataFrame({"x" * length: ["a"]})
        write_atomically(path, partial(write_rows, table))
        assert_frame_equal(read_rows(path), table)
        data = bytearray(path.read_bytes())
        data[length // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(pl.exceptions.ComputeError, match="it changed after it was written"):
            read_rows(path)


def test_equal_rows_give_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_atomically(tmp_path / name, partial(write_rows, numbered(20_000)))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_is_read_with_the_asked_columns_that_it_has_and_with_its_first_rows(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    with path.open("w+b") as file:
        write_rows(pl.DataFrame({"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}), file)
    assert read_rows(path, ["c", "missing", "a"], limit=2).to_dict(as_series=False) == {
        "a": [1, 2],
        "c": [7, 8],
    }


def test_a_digest_does_not_depend_on_how_many_rows_are_encoded_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = range(23)
    table = pl.DataFrame({"a": [f"x{each}, {each}" for each in numbers], "b": [each / 3 for each in numbers]})
    csv = table.write_csv() + table.clear().write_csv() + "run"
    expected = hashlib.sha256(csv.encode()).hexdigest()
    for number in (1, 5, 23, 100):
        monkeypatch.setattr("pipeline.storage.tables.parquet.ROWS_AT_ONCE", number)
        assert content_digest(table, table.clear(), more="run") == expected
