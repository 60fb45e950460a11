"""Complete findings of the checks of validated_dataset: numbers, order and wording of their rows."""

from __future__ import annotations

import polars as pl
import pytest

from pipeline.recipe import recipe_from_mapping
from pipeline.reporting.findings import CheckContext, Finding
from pipeline.reporting.reports import report_path
from pipeline.validated_dataset import checks
from tests.pipeline.dataset_folder import Folder


def checked(folder: Folder, *, sources: bool = True) -> dict[str, Finding]:
    context = CheckContext(folder.recipe, folder.tables, sources=sources)
    return {finding.name: finding for finding in checks.run(context)}


def test_the_rejected_fraction_has_its_numbers_and_the_most_frequent_reason_first(folder: Folder) -> None:
    folder.checks = {"max_rejected_fraction": 0.9}
    for name in ("a.png", "b.png"):
        folder.add(name)
    folder.add("empty 1.png", b"")
    folder.add("empty 2.png", b"")
    folder.add("text.png", b"these are only words")
    folder.add("bare.png", caption=None)
    folder.ingest()
    finding = checked(folder)["rejected_fraction"]
    assert finding.passed
    counts = "2 empty_file, 1 caption_missing, 1 not_an_image"
    assert finding.summary == f"4 of 6 images are rejected (66.7%, the limit is 90.0%): {counts}"
    numbers = {"rejected": 4, "of": 6, "fraction": 0.666667, "limit": 0.9}
    assert finding.numbers == {"num_rows": 0, **numbers}

    folder.checks = {"max_rejected_fraction": 0.5}
    finding = checked(folder)["rejected_fraction"]
    assert finding.closes
    names = ["d/empty 1.png", "d/empty 2.png", "d/bare.png", "d/text.png"]
    assert [row["sample_id"] for row in finding.rows] == names
    assert finding.numbers == {"num_rows": 4, **numbers, "limit": 0.5}


def test_without_rejected_images_the_fraction_has_no_reasons(folder: Folder) -> None:
    folder.add("a.png")
    folder.add("b.png")
    folder.ingest()
    finding = checked(folder)["rejected_fraction"]
    assert finding.summary == "0 of 2 images are rejected (0.0%, the limit is 5.0%)"


def test_an_image_that_the_scan_does_not_have_has_no_recorded_size(folder: Folder) -> None:
    for name in ("a.png", "b.png", "c.png"):
        folder.add(name)
    folder.ingest()
    raw = folder.tables.read("raw_images")
    folder.tables.write("raw_images", raw.filter(pl.col("path") != "b.png"))
    finding = checked(folder)["shape_uniformity"]
    assert finding.closes
    assert [row["sample_id"] for row in finding.rows] == ["d/b.png"]


@pytest.mark.parametrize("edge", ["height", "width"])
def test_images_of_another_size_than_recorded_are_listed(folder: Folder, edge: str) -> None:
    for name in ("a.png", "b.png", "c.png"):
        folder.add(name)
    table = folder.ingest().table
    wrong = pl.col(edge) + pl.col("path").is_in(["a.png", "c.png"]).cast(pl.Int32)
    folder.tables.write("validated_dataset", table.with_columns(wrong))
    finding = checked(folder)["shape_uniformity"]
    assert finding.closes
    assert finding.summary == "2 images decode to another size than recorded, first d/a.png"
    assert [row["sample_id"] for row in finding.rows] == ["d/a.png", "d/c.png"]


def test_without_the_datasets_files_are_not_compared(folder: Folder) -> None:
    folder.add("a.png").write_bytes(folder.picture(1))
    folder.ingest()
    (folder.root / "a.png").unlink()
    assert checked(folder)["file_size_outliers"].closes
    skipped = checked(folder, sources=False)["file_size_outliers"]
    assert skipped.passed
    assert skipped.summary == "skipped: this run does not read the datasets"


def test_files_of_a_dataset_that_the_recipe_no_longer_has_count_as_vanished(folder: Folder) -> None:
    folder.add("a.png")
    folder.add("b.png")
    folder.ingest()
    mapping = {
        "datasets": [{"name": "other", "path": str(folder.root)}],
        "cache_dir": str(folder.output_dir / "cache"),
        "output_dir": str(folder.output_dir),
        "model": {"base": "no model"},
        "buckets": {"resolution": 64, "step": 8},
    }
    recipe = recipe_from_mapping("small", mapping)
    findings = {each.name: each for each in checks.run(CheckContext(recipe, folder.tables))}
    reason = "vanished: its dataset was removed from the recipe"
    expected = [{"sample_id": f"d/{name}.png", "reason": reason} for name in ("a", "b")]
    assert findings["file_size_outliers"].rows == expected


def test_the_bytes_of_kept_and_of_rejected_files_are_counted(folder: Folder) -> None:
    kept = [folder.add(name).stat().st_size for name in ("a.png", "b.png")]
    rejected = folder.add("bare.png", caption=None).stat().st_size
    folder.ingest()
    finding = checked(folder)["file_size_outliers"]
    assert finding.passed
    assert finding.summary == f"none of 2 files has changed since the scan; {rejected:,} bytes rejected"
    assert finding.numbers == {"num_rows": 0, "kept_bytes": sum(kept), "rejected_bytes": rejected}


def test_the_sides_of_the_split_are_counted(folder: Folder) -> None:
    folder.validation_fraction = 0.5
    for number in range(20):
        folder.add(f"{number}.png", folder.picture(number))
    folder.ingest()
    finding = checked(folder)["validation_apart"]
    held_out = finding.numbers["held_out"]
    assert finding.passed
    assert 0 < held_out < 20
    assert finding.numbers == {"num_rows": 0, "held_out": held_out, "trained": 20 - held_out, "leaks": 0}
    assert finding.summary == f"{held_out} of 20 images held out, none similar to a training image"


def test_the_first_of_several_caption_conflicts_is_named_and_all_are_counted(folder: Folder) -> None:
    for name in ("a", "b", "c"):
        folder.add(f"{name}.png", caption=f"words of {name}")
        (folder.root / f"{name}.caption").write_text("other words")
    folder.captions = {"suffix": [".txt", ".caption"]}
    folder.ingest()
    finding = checked(folder)["captions_agree"]
    what = "3 images have different captions in two files: d/a.png uses a.txt, not a.caption"
    assert finding.summary == what
    assert finding.numbers == {"num_rows": 3, "caption_conflicts": 3}

    report_path(folder.output_dir, "validated_dataset").unlink()
    finding = checked(folder)["captions_agree"]
    assert finding.passed
    assert finding.numbers == {"num_rows": 0}


def test_groups_of_similar_images_are_listed_by_their_size_and_then_by_hash(folder: Folder) -> None:
    folder.duplicates = "keep_all"
    for name in "abcdefgh":
        folder.add(f"{name}.png")
    folder.add("same as a.png", folder.picture(sum(b"a.png")))
    table = folder.ingest().table
    groups = {"b": "2", "c": "2", "d": "3", "e": "3", "f": "3", "g": "1", "h": "1"}
    group = pl.col("path").str.head(1).replace(groups)
    is_copy = pl.col("path").is_in(["a.png", "same as a.png"])
    grouped = pl.when(is_copy).then(pl.lit("0")).otherwise(group)
    folder.tables.write("validated_dataset", table.with_columns(duplicate_group=grouped))
    finding = checked(folder)["look_alikes"]
    assert (finding.passed, finding.closes) == (False, False)
    assert finding.rows == [
        {"what": "look alike", "images": "d/d.png | d/e.png | d/f.png"},
        {"what": "same bytes", "images": "d/a.png | d/same as a.png"},
        {"what": "look alike", "images": "d/g.png | d/h.png"},
        {"what": "look alike", "images": "d/b.png | d/c.png"},
    ]
    assert finding.numbers == {
        "num_rows": 4,
        "copies_left_out": 0,
        "groups": 4,
        "images_in_groups": 9,
        "near_duplicate_bits": 4,
    }
    assert finding.summary.startswith("removed copies: 0; similar images: 9 in 4 groups; first: d/d.png")


def test_copies_that_are_left_out_are_listed_without_a_group(folder: Folder) -> None:
    folder.add("a.png", folder.picture(1))
    folder.add("b.png", folder.picture(1))
    folder.ingest()
    finding = checked(folder)["look_alikes"]
    assert not finding.passed
    of = "same bytes and caption as d/a.png, which is kept"
    assert finding.rows == [{"what": "copy, left out", "images": "d/b.png", "of": of}]
    numbers = {"copies_left_out": 1, "groups": 0, "images_in_groups": 0, "near_duplicate_bits": 4}
    assert finding.numbers == {"num_rows": 1, **numbers}
