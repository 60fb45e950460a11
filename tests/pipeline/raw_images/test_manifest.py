"""Manifests in three formats give samples, and their untrusted paths never leave the dataset."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path
from typing import Any, Literal

import polars as pl
import pytest

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.errors import DatasetError
from pipeline.raw_images.manifest import captions_by_path, walk_manifest
from pipeline.raw_images.manifest_file import read_manifest
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.storage.remote_source import source_at
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.stage import validate
from tests.pipeline.dataset_folder import picture
from tests.remote_folders import published_in_bucket

ROWS = [
    {"path": "a.png", "caption": "a cat", "other": "a small cat", "score": 7},
    {"path": "sub/b.png", "caption": "a dog", "other": None, "score": 3},
    {"path": "./c.png", "caption": "  ", "other": "a bird", "score": 9},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    (root / "sub").mkdir(parents=True)
    for index, row in enumerate(ROWS):
        (root / str(row["path"])).write_bytes(picture(index))
    return root


def write(folder: Path, kind: str, rows: list[dict[str, Any]] | None = None) -> Path:
    path, table = folder / f"list.{kind}", pl.DataFrame(ROWS if rows is None else rows)
    {"csv": table.write_csv, "parquet": table.write_parquet, "jsonl": table.write_ndjson}[kind](path)
    return path


def recipe(manifest: Path, buckets: dict[str, Any] | None = None, **settings: Any) -> Recipe:
    root = manifest.parent.parent
    dataset = {"name": "d", "path": manifest, "captions": {"from": "column"}, **settings}
    values = {"datasets": [dataset], "output_dir": root / "out", "cache_dir": root / "cache"}
    sections = {"model": {"base": "a/b"}, "buckets": buckets or {}}
    return recipe_from_mapping("r", {**values, **sections})


def focused(manifest: Path, columns: tuple[str, str]) -> Recipe:
    """A recipe that crops around the focus points in the columns."""
    buckets = {"resolution": 48, "step": 8, "max_aspect_ratio": 1.0, "crop": "focus"}
    captions = {"from": "fixed", "text": "a photo"}
    return recipe(manifest, buckets=buckets, captions=captions, focus_columns=columns)


def run(recipe: Recipe) -> tuple[pl.DataFrame, dict[str, str]]:
    """Kept rows, and rejection reasons by path."""
    tables = Tables(recipe.output_dir)
    raw = scan(recipe, tables, log=str)
    valid = validate(recipe, raw.table, tables, log=str)
    rejected = pl.concat([raw.rejected, valid.rejected])
    assert valid.report["in"] == valid.report["kept"] + valid.report["rejected"]
    return valid.table, dict(rejected.select("path", "reason").iter_rows())


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_each_format_gives_the_same_samples(folder: Path, kind: str) -> None:
    kept, reasons = run(recipe(write(folder, kind)))
    assert kept.select("sample_id", "caption", "caption_from").rows() == [
        ("d/a.png", "a cat", "column"),
        ("d/sub/b.png", "a dog", "column"),
    ]
    assert reasons == {"c.png": "caption_empty"}


def test_several_caption_columns_become_variants_and_empty_cells_are_skipped(folder: Path) -> None:
    columns = {"from": "column", "columns": ["caption", "other"]}
    kept, reasons = run(recipe(write(folder, "csv"), captions=columns))
    assert dict(kept.select("path", "caption").iter_rows()) == {
        "a.png": "a cat",
        "sub/b.png": "a dog",
        "c.png": "a bird",
    }
    more = {path: json.loads(text) for path, text in kept.select("path", "more_captions").iter_rows()}
    assert more == {"a.png": ["a small cat"], "sub/b.png": [], "c.png": []}
    assert reasons == {}


def test_images_may_be_in_another_folder_and_paths_in_another_column(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    manifest = tmp_path / "lists" / "mine.jsonl"
    manifest.write_text(json.dumps({"file": "a.png", "caption": "a cat"}) + "\n", encoding="utf-8")
    kept, _ = run(recipe(manifest, images=folder, path_column="file"))
    assert kept["sample_id"].to_list() == ["d/a.png"]


def test_only_images_in_the_manifest_are_found_and_sidecars_work(folder: Path) -> None:
    (folder / "a.txt").write_text("from the file")
    kept, _ = run(recipe(write(folder, "csv", ROWS[:1]), captions={}))
    assert kept.select("path", "caption").rows() == [("a.png", "from the file")]


def test_filters_can_use_the_manifests_columns(folder: Path) -> None:
    kept, reasons = run(recipe(write(folder, "parquet"), filters={"where": "score > 5"}))
    assert kept["path"].to_list() == ["a.png"]
    assert reasons == {"sub/b.png": "filter_where", "c.png": "caption_empty"}


@pytest.mark.parametrize("name", ["caf\u00e9.png", "Bl\u00fcten/\u00c5.png", "\u1e69 \ud55c\uae00.png"])
@pytest.mark.parametrize("on_disk", ["NFC", "NFD"])
def test_I17_names_that_differ_from_the_disk_in_unicode_form_are_found(
    folder: Path, name: str, on_disk: Literal["NFC", "NFD"]
) -> None:
    in_manifest = unicodedata.normalize("NFD" if on_disk == "NFC" else "NFC", name)
    stored = unicodedata.normalize(on_disk, name)
    (folder / stored).parent.mkdir(exist_ok=True)
    (folder / stored).write_bytes(picture(5))
    if (folder / in_manifest).exists():
        pytest.skip("this file system folds names itself")
    rows = [{"path": in_manifest, "caption": "a cat", "x": 0.25, "y": 0.5, "score": 3}, ROWS[0]]
    settings = {"filters": {"where": "score = 3"}, "focus_columns": ("x", "y"), "buckets": {"crop": "focus"}}
    kept, reasons = run(recipe(write(folder, "jsonl", rows), **settings))
    assert kept.select("path", "caption", "focus_x").rows() == [(stored, "a cat", 0.25)]
    assert kept["sample_id"].to_list() == [f"d/{unicodedata.normalize('NFC', name)}"]
    assert reasons == {"a.png": "filter_where"}


def test_I17_both_spellings_of_one_file_are_listed_twice_and_missing_ones_are_not_found(folder: Path) -> None:
    spellings = [unicodedata.normalize(form, "caf\u00e9.png") for form in ("NFC", "NFD")]
    (folder / spellings[1]).write_bytes(picture(5))
    rows = [{"path": path} for path in (*spellings, "gone/\u00fc.png", "\u00fc.png")]
    settings = recipe(write(folder, "jsonl", rows), captions={}).datasets[0]
    walk = walk_manifest(settings, source_at(settings.root))
    assert [image.path for image in walk.images] == spellings[1:]
    assert walk.passed_over == {"listed_twice": 1}
    assert [problem.reason for problem in walk.problems] == ["not_found", "not_found"]


def test_I25_hostile_paths_are_rejected_with_their_reason(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(picture(9))
    (folder / "link.png").symlink_to(secret)
    (folder / "way").symlink_to(tmp_path, target_is_directory=True)
    (folder / "inside.png").symlink_to(folder / "a.png")
    os.mkfifo(folder / "pipe.png")
    paths = {
        "/etc/passwd": "outside_dataset",
        "../secret.png": "outside_dataset",
        "sub/../../other.png": "outside_dataset",
        "..": "outside_dataset",
        "link.png": "outside_dataset",
        "way/secret.png": "outside_dataset",
        "pipe.png": "special_file",
        "sub": "special_file",
        "gone.png": "not_found",
        "a.png/b.png": "not_found",
        "x" * 5000: "not_found",
        "new\nline.png": "not_found",
        "null\0.png": "not_found",
    }
    rows = [{"path": path, "caption": "x"} for path in [*paths, "inside.png", "a.png"]]
    kept, reasons = run(recipe(write(folder, "parquet", rows), duplicates="keep_all"))
    assert kept["path"].to_list() == ["a.png", "inside.png"]
    assert reasons == paths


def test_repeated_and_empty_paths_are_counted(folder: Path) -> None:
    rows = [{"path": path} for path in ("a.png", "./a.png", "sub/../a.png", None, "", "sub/b.png")]
    settings = recipe(write(folder, "jsonl", rows), captions={}).datasets[0]
    walk = walk_manifest(settings, source_at(settings.root))
    assert sorted(image.path for image in walk.images) == ["a.png", "sub/b.png"]
    assert walk.passed_over == {"listed_twice": 2, "rows_without_path": 2}


def test_digits_in_a_csvs_captions_and_paths_stay_as_written(folder: Path) -> None:
    (folder / "007").write_bytes(picture(7))
    (folder / "a.csv").write_text("path,caption\n007,0010\n", encoding="utf-8")
    kept, reasons = run(recipe(folder / "a.csv"))
    assert kept.select("path", "caption").rows() == [("007", "0010")]
    assert reasons == {}


LITERALS = ("007", "NA", "true", "1e5", "null", "-0.0", "2026-01-02", "=1+1")
"""Captions that a reader of tables may take for numbers, dates, booleans or missing values."""


@pytest.mark.parametrize("kind", ["csv", "quoted.csv", "jsonl", "parquet", "txt"])
def test_captions_that_look_like_other_values_stay_as_written(folder: Path, kind: str) -> None:
    for number in range(len(LITERALS)):
        (folder / f"{number}.png").write_bytes(picture(number + 10))
    rows = [{"path": f"{number}.png", "caption": text} for number, text in enumerate(LITERALS)]
    if kind == "txt":
        for number, text in enumerate(LITERALS):
            (folder / f"{number}.txt").write_text(text, encoding="utf-8")
        listed = recipe(write(folder, "jsonl", [{"path": row["path"]} for row in rows]), captions={})
    elif kind == "quoted.csv":
        path = folder / "list.csv"
        pl.DataFrame(rows).write_csv(path, quote_style="always")
        listed = recipe(path)
    else:
        listed = recipe(write(folder, kind, rows))
    kept, reasons = run(listed)
    assert reasons == {}
    assert kept.sort("path")["caption"].to_list() == list(LITERALS)


def all_captions(kept: pl.DataFrame) -> dict[str, list[str]]:
    return {row["path"]: [row["caption"], *json.loads(row["more_captions"])] for row in kept.to_dicts()}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_of_lists_gives_several_captions_per_image(folder: Path, kind: str) -> None:
    rows = [
        {"path": "a.png", "caption": ["a cat", "", None, "a small cat"]},
        {"path": "sub/b.png", "caption": ["a dog"]},
        {"path": "c.png", "caption": []},
    ]
    kept, reasons = run(recipe(write(folder, kind, rows)))
    assert all_captions(kept) == {"a.png": ["a cat", "a small cat"], "sub/b.png": ["a dog"]}
    assert reasons == {"c.png": "caption_empty"}


def test_rows_of_json_lines_may_have_a_text_or_a_list_of_texts(folder: Path) -> None:
    rows = [
        {"path": "a.png", "caption": "[v] a cat"},
        {"path": "sub/b.png", "caption": ["a dog", None, 7, "a small dog"]},
        {"path": "c.png"},
        {"path": "c.png", "caption": 8},
    ]
    lines = [json.dumps(row) for row in rows]
    (folder / "list.jsonl").write_text("\n\n".join(lines), encoding="utf-8-sig")
    kept, _ = run(recipe(folder / "list.jsonl"))
    assert all_captions(kept) == {
        "a.png": ["[v] a cat"],
        "c.png": ["8"],
        "sub/b.png": ["a dog", "7", "a small dog"],
    }


def test_texts_in_brackets_are_texts_for_a_filter_too(folder: Path) -> None:
    rows = [{"path": "a.png", "caption": "[OC] a cat"}, {"path": "sub/b.png", "caption": "{x} a dog"}]
    manifest = write(folder, "jsonl", rows)
    kept, _ = run(recipe(manifest, filters={"where": "caption LIKE '%cat'"}))
    assert all_captions(kept) == {"a.png": ["[OC] a cat"]}


@pytest.mark.timeout(60)
def test_many_rows_of_one_image_take_time_in_proportion(folder: Path) -> None:
    """If each row copied the captions before it, these rows would take a quarter of an hour."""
    texts = [f"caption {number}" for number in range(100_000)]
    rows = pl.DataFrame({"path": ["a.png"] * len(texts), "caption": texts})
    (dataset,) = recipe(write(folder, "csv")).datasets
    assert captions_by_path(dataset, rows) == {"a.png": tuple(texts)}


def test_an_image_in_several_rows_has_the_captions_of_all_rows_that_pass_the_filter(folder: Path) -> None:
    more = [
        {"path": "./a.png", "caption": "a tabby", "other": None, "score": 8},
        {"path": "a.png", "caption": "a cat", "other": None, "score": 9},
        {"path": "a.png", "caption": "badly put", "other": None, "score": 1},
    ]
    manifest = write(folder, "parquet", [*ROWS, *more])
    kept, _ = run(recipe(manifest))
    assert all_captions(kept)["a.png"] == ["a cat", "a tabby", "badly put"]
    kept, _ = run(recipe(manifest, filters={"where": "score > 2"}))
    assert all_captions(kept) == {"a.png": ["a cat", "a tabby"], "sub/b.png": ["a dog"]}


def test_absolute_paths_below_the_datasets_folder_are_accepted(folder: Path) -> None:
    rows = [{**row, "path": str(folder / str(row["path"]))} for row in ROWS]
    kept, _ = run(recipe(write(folder, "csv", rows)))
    assert kept["sample_id"].to_list() == ["d/a.png", "d/sub/b.png"]
    sibling = [{"path": f"{folder}-other/a.png", "caption": "x"}]
    _, reasons = run(recipe(write(folder, "csv", sibling)))
    assert list(reasons.values()) == ["outside_dataset"]


def test_paths_with_backslashes_get_a_fix(folder: Path) -> None:
    manifest = write(folder, "csv", [{"path": r".\sub\b.png", "caption": "x"}])
    used = recipe(manifest)
    (problem,) = walk_manifest(used.datasets[0], source_at(folder)).problems
    assert problem.fix == "use / instead of \\ in its paths"


def test_C03_missing_captions_suggest_the_manifests_columns(folder: Path) -> None:
    used = recipe(write(folder, "csv"), captions={})
    tables = Tables(used.output_dir)
    rejected = validate(used, scan(used, tables, log=str).table, tables, log=str).rejected
    assert len(rejected) > 0
    assert [fix for fix in rejected["fix"] if "captions: {from: column" not in fix] == []


def test_a_missing_manifest_is_an_error(folder: Path) -> None:
    with pytest.raises(DatasetError, match="cannot be read"):
        scan(recipe(folder / "none.csv"), Tables(folder.parent / "out"), log=str)


def test_images_of_an_unchanged_manifest_are_not_read_again(folder: Path, settled: Any) -> None:
    used = recipe(write(folder, "csv"))
    tables = Tables(used.output_dir)
    tables.write("raw_images", scan(used, tables, log=str).table)
    settled()
    assert scan(used, tables, log=str).report["read"] == 0


def test_the_manifests_focus_point_decides_the_crop(folder: Path) -> None:
    focuses = [(0.0, 0.0), (1.0, None), (None, None)]
    rows = [row | {"x": x, "y": y} for row, (x, y) in zip(ROWS, focuses, strict=True)]
    manifest = write(folder, "parquet", rows)
    used = focused(manifest, ("x", "y"))
    kept, rejected = run(used)
    assert rejected == {}
    table = assign_buckets(used, kept, log=str).table
    over = {row["path"]: (row["resized_width"] - 48, row["crop_left"]) for row in table.to_dicts()}
    assert all(more > 1 for more, _ in over.values()), "each overlaps its bucket to the right"
    assert {path: left for path, (_, left) in over.items()} == {
        "a.png": 0,
        "sub/b.png": over["sub/b.png"][0],
        "c.png": over["c.png"][0] // 2,
    }


def test_an_image_in_several_rows_has_the_focus_of_the_first_row_that_passes_the_filter(folder: Path) -> None:
    focuses = [(0.1, 0.2, 3), (2.0, 2.0, 1), (0.3, 0.4, 7), (0.5, 0.6, 8)]
    rows = [ROWS[0] | {"x": x, "y": y, "score": score} for x, y, score in focuses]
    manifest = write(folder, "csv", rows)
    settings = {
        "captions": {"from": "fixed", "text": "a"},
        "focus_columns": ("x", "y"),
        "buckets": {"crop": "focus"},
    }
    for where, focus in (("score > 1", (0.1, 0.2)), ("score > 5", (0.3, 0.4))):
        kept, rejected = run(recipe(manifest, filters={"where": where}, **settings))
        assert rejected == {}
        assert kept.select("focus_x", "focus_y").rows() == [focus]


@pytest.mark.parametrize("wrong", [1.01, -0.5, float("nan")])
def test_a_focus_point_outside_the_image_is_rejected(folder: Path, wrong: float) -> None:
    manifest = write(folder, "parquet", [ROWS[0] | {"x": 0.5, "y": wrong}])
    kept, rejected = run(focused(manifest, ("x", "y")))
    assert len(kept) == 0
    assert rejected == {"a.png": "focus_outside"}


def test_an_unusable_focus_column_is_an_error_that_names_it(folder: Path) -> None:
    manifest = write(folder, "csv", [ROWS[0] | {"x": "left", "y": 0.5}])
    with pytest.raises(DatasetError, match="'x' must hold numbers, got String") as raised:
        run(focused(manifest, ("x", "y")))
    assert raised.value.where == str(manifest)
    with pytest.raises(DatasetError, match="no column 'z'"):
        run(focused(manifest, ("x", "z")))


def test_C06_removing_and_reordering_rows_keeps_each_images_caption(folder: Path) -> None:
    kept, _ = run(recipe(write(folder, "csv")))
    captions = dict(kept.select("path", "caption").rows())
    assert len(captions) == 2
    kept, _ = run(recipe(write(folder, "csv", ROWS[:0:-1])))
    assert dict(kept.select("path", "caption").rows()) == {"sub/b.png": captions["sub/b.png"]}


SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("csv", "parquet")]


@pytest.mark.parametrize("kind", ["jsonl", *SLOW_KINDS])
def test_a_manifest_and_its_images_may_each_be_local_or_in_an_object_store(
    folder: Path, kind: str, s3: str
) -> None:
    del s3
    rows = [*ROWS, {"path": "../out.png"}, {"path": "gone.png"}]
    local_manifest = write(folder, kind, rows)
    kept, reasons = run(recipe(local_manifest, captions={"from": "column", "columns": ["other"]}))
    address = published_in_bucket(folder).address
    settings = {"captions": {"from": "column", "columns": ["other"]}}
    for number, (path, images) in enumerate(
        [(f"{address}/list.{kind}", None), (local_manifest, address), (f"{address}/list.{kind}", folder)]
    ):
        place = folder.parent / f"out-{number}"
        remote_recipe = recipe(local_manifest, path=path, images=images, **settings).model_copy(
            update={"output_dir": place}
        )
        remote_rows, rejected = run(remote_recipe)
        columns = ["sample_id", "content_hash", "caption", "more_captions"]
        assert remote_rows.select(columns).equals(kept.select(columns))
        assert rejected == reasons


def test_full_addresses_below_the_dataset_are_accepted_and_others_rejected(folder: Path, s3: str) -> None:
    del s3
    write(folder, "csv")
    address = published_in_bucket(folder).address
    inside = {f"{address}/a.png": "d/a.png", f"{address}//sub/../sub/b.png": "d/sub/b.png"}
    outside = [f"{address}-other/a.png", f"{address}/../a.png", "https://example.org/a.png"]
    manifest = write(folder, "jsonl", [{"path": path, "caption": "x"} for path in [*inside, *outside]])
    kept, reasons = run(recipe(manifest, images=address))
    assert kept["sample_id"].to_list() == list(inside.values())
    assert reasons == dict.fromkeys(outside, "outside_dataset")
    _, reasons = run(recipe(manifest))
    assert reasons == dict.fromkeys([*inside, *outside], "outside_dataset")


def test_an_unreadable_manifest_in_an_object_store_is_an_error(folder: Path, s3: str) -> None:
    del s3
    (folder / "bad.csv").write_bytes(b"path\n\xff\xfe\n")
    address = published_in_bucket(folder).address
    for name in ("bad.csv", "none.csv"):
        settings = recipe(folder / "x.csv", path=f"{address}/{name}").datasets[0]
        with pytest.raises(DatasetError, match="the manifest cannot be read") as excinfo:
            read_manifest(settings)
        assert excinfo.value.where == f"{address}/{name}"
