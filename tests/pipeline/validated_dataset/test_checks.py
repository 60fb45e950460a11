"""The checks of the first three stages pass on good folders and report bad ones."""

from __future__ import annotations

import io
import os
import re
import statistics
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from PIL import Image
from skimage import data

from pipeline.aspect_buckets import checks as aspect_buckets
from pipeline.raw_images import checks as raw_images
from pipeline.reporting.findings import CheckContext, Finding
from pipeline.storage.tables.schemas import has_defect
from pipeline.validated_dataset import checks as validated_dataset
from tests.pipeline.reporting.row_columns import require_columns


def checked(module: Any, folder: Any) -> dict[str, Finding]:
    findings = module.run(CheckContext(folder.recipe, folder.tables))
    require_columns(findings)
    return {finding.name: finding for finding in findings}


def closed(findings: dict[str, Finding]) -> list[str]:
    return [name for name, finding in findings.items() if finding.closes]


def test_good_photographs_pass_every_check(folder: Any, photos: Path, tiny_sd: Path) -> None:
    folder.root = photos
    folder.ingest()
    folder.assign()
    recipe = folder.recipe
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"base": str(tiny_sd)})})
    for module in (raw_images, validated_dataset, aspect_buckets):
        for finding in module.run(CheckContext(recipe, folder.tables)):
            assert finding.passed, finding
            assert finding.fix == ""


def test_I08_a_dataset_without_images_reports_the_searched_folder_and_its_files(folder: Any) -> None:
    (folder.root / "a.mp4").write_bytes(b"x")
    (folder.root / ".hidden.jpg").write_bytes(b"x")
    folder.scan()
    findings = checked(raw_images, folder)
    assert closed(findings) == ["images_found"]
    finding = findings["images_found"]
    assert str(folder.root) in finding.summary
    assert "1 hidden" in finding.summary
    assert "1 mp4" in finding.summary


def test_I08_a_dataset_added_after_the_scan_requires_a_new_scan(folder: Any) -> None:
    folder.add("a.png")
    folder.scan()
    recipe = folder.recipe
    added = recipe.datasets[0].model_copy(update={"name": "more"})
    recipe = recipe.model_copy(update={"datasets": (*recipe.datasets, added)})
    findings = {each.name: each for each in raw_images.run(CheckContext(recipe, folder.tables))}
    assert findings["images_found"].closes
    assert "dataset more has no images: it was added" in findings["images_found"].summary
    assert "run the cache job" in findings["images_found"].fix


def test_I08_a_dataset_with_only_rejected_images_lists_the_reasons(folder: Any) -> None:
    folder.add("a.png", b"")
    folder.scan()
    findings = checked(raw_images, folder)["images_found"]
    assert findings.summary.endswith("all files were rejected: 1 empty file; a.png: the file is empty")
    assert "copy or download it again" in findings.fix


def test_one_unusual_file_is_counted_in_the_singular(folder: Any) -> None:
    folder.add("a.png")
    (folder.root / "film.txt").write_text("x")
    folder.scan()
    assert checked(raw_images, folder)["oddities"].summary == "unusual files: 1 caption without image"


def test_I17_names_that_differ_only_in_case_or_unicode_form_close_the_gate(folder: Any) -> None:
    for index, name in enumerate(("Cat.png", "cat.png", "caf\u00e9.png", "cafe\u0301.png", "dog.png")):
        folder.add(name, folder.picture(index))
    if len(list(folder.root.glob("*.png"))) < 5:
        pytest.skip("this file system folds names itself")
    folder.scan()
    findings = checked(raw_images, folder)
    assert closed(findings) == ["names_distinct"]
    rows = {row["differ_in"]: row["names"] for row in findings["names_distinct"].rows}
    assert rows["case"] == "d/Cat.png | d/cat.png"
    assert "caf" in rows["Unicode form"]
    folder.checks = {"allow": ["names_distinct"]}
    assert closed(checked(raw_images, folder)) == []


def test_a_lost_sample_closes_the_gate(folder: Any) -> None:
    folder.add("a.png")
    folder.add("b.png", b"")
    result = folder.scan()
    assert closed(checked(raw_images, folder)) == []
    folder.tables.write("raw_images", result.table.clear())
    assert "conservation" in closed(checked(raw_images, folder))


def test_an_impossible_number_of_channels_closes_the_gate(folder: Any) -> None:
    folder.add("a.png")
    table = folder.scan().table
    folder.tables.write("raw_images", table.with_columns(channels=pl.lit(5, pl.Int32)))
    assert closed(checked(raw_images, folder)) == ["shape_uniformity"]


def test_unusual_bytes_per_pixel_within_a_format_warn(folder: Any) -> None:
    for index in range(12):
        folder.add(f"{index}.png", folder.picture(index))
    folder.add("huge.png", folder.picture(99) + b"\0" * 50_000)
    folder.add("lonely.bmp", folder.picture(99, kind="BMP"))
    folder.scan()
    finding = checked(raw_images, folder)["file_size_outliers"]
    assert (finding.passed, finding.severity) == (False, "warn")
    [row] = finding.rows
    assert (row["sample_id"], row["format"]) == ("d/huge.png", "PNG")
    num_bytes = [(folder.root / f"{name}.png").stat().st_size for name in (*range(12), "huge")]
    per_pixel = [each / (24 * 40) for each in num_bytes]
    assert row["bytes_per_pixel"] == pytest.approx(per_pixel[-1], abs=1e-4)
    assert row["median"] == pytest.approx(statistics.median(per_pixel), abs=1e-4)
    assert finding.numbers == {"num_rows": 1, "judged": 13, "not_judged": 1}


def test_oddities_are_listed_and_only_warn(folder: Any, tmp_path: Path) -> None:
    folder.add("real.png")
    folder.add("wrong.jpg", folder.picture(3))
    (folder.root / "lonely.txt").write_text("x")
    (folder.root / "other.npz").write_bytes(b"x")
    (tmp_path / "outside.png").write_bytes(folder.picture(4))
    (folder.root / "link.png").symlink_to(tmp_path / "outside.png")
    folder.scan()
    finding = checked(raw_images, folder)["oddities"]
    assert not finding.closes
    assert {(row["what"], row["path"]) for row in finding.rows} == {
        ("wrong suffix", "d/wrong.jpg"),
        ("leads out", "d/link.png"),
        ("foreign cache", "d/other.npz"),
        ("lonely caption", "d/lonely.txt"),
    }


@pytest.mark.parametrize(
    ("caption", "gate"),
    [(None, "captions_present"), ("", "captions_present"), (b"na\xefve", "captions_decodable")],
)
def test_C03_a_caption_problem_closes_its_gate_at_any_rejected_fraction_until_allowed(
    folder: Any, caption: str | bytes | None, gate: str
) -> None:
    folder.checks = {"max_rejected_fraction": 1.0}
    folder.add("good.png")
    folder.add("bad.png", caption=caption)
    folder.ingest()
    findings = checked(validated_dataset, folder)
    assert closed(findings) == [gate]
    assert "d/bad.png" in findings[gate].summary
    folder.checks = {"max_rejected_fraction": 1.0, "allow": [gate]}
    assert closed(checked(validated_dataset, folder)) == []


def test_I16_two_images_that_share_a_caption_close_the_gate(folder: Any) -> None:
    folder.add("x.png", folder.picture(1))
    folder.add("x.bmp", folder.picture(2, kind="BMP"))
    folder.ingest()
    findings = checked(validated_dataset, folder)
    assert closed(findings) == ["captions_unshared"]
    assert findings["captions_unshared"].rows == [{"caption": "d/x.txt", "images": "d/x.bmp | d/x.png"}]


def test_the_rejected_fraction_counts_both_stages_and_an_empty_dataset_always_closes_the_gate(
    folder: Any,
) -> None:
    folder.captions = {"from": "fixed", "text": "x"}
    for index in range(8):
        folder.add(f"{index}.png")
    folder.add("empty.png", b"")
    folder.add("cut.bmp", folder.picture(1, kind="BMP")[:1000])
    folder.checks = {"max_rejected_fraction": 0.19}
    folder.ingest()
    finding = checked(validated_dataset, folder)["rejected_fraction"]
    assert finding.closes
    assert "2 of 10 images are rejected (20.0%" in finding.summary
    folder.checks = {"max_rejected_fraction": 0.2}
    assert closed(checked(validated_dataset, folder)) == []
    for index in range(8):
        (folder.root / f"{index}.png").write_bytes(b"")
    folder.checks = {"max_rejected_fraction": 1.0}
    folder.ingest()
    assert closed(checked(validated_dataset, folder)) == ["rejected_fraction"]


def test_I08_filters_that_reject_everything_close_the_gate_and_cannot_be_allowed(folder: Any) -> None:
    for index in range(3):
        folder.add(f"{index}.png")
    folder.add("bare.png", caption=None)
    folder.add("wide.png", folder.picture(9, 24, 400), caption=None)
    folder.dataset = {"filters": {"min_height": 30, "max_aspect_ratio": 5.0}}
    folder.checks = {"max_rejected_fraction": 1.0, "allow": ["rejected_fraction", "captions_present"]}
    folder.ingest()
    finding = checked(validated_dataset, folder)["rejected_fraction"]
    assert finding.closes
    assert finding.summary.startswith("no samples are left of 5 images: 5 filter_min_height")
    assert "change filters.min_height of dataset d, now 30" in finding.fix
    assert "checks.allow" not in finding.fix
    assert sorted(row["sample_id"] for row in finding.rows) == [
        *(f"d/{index}.png" for index in range(3)),
        *("d/bare.png", "d/wide.png"),
    ]


def test_I08_an_empty_dataset_names_the_most_frequent_reason_first(folder: Any) -> None:
    for index in range(3):
        folder.add(f"{index}.png")
    folder.add("large.png", folder.picture(9, 80, 80), caption=None)
    folder.dataset = {"filters": {"min_pixels": 5000}}
    folder.ingest()
    finding = checked(validated_dataset, folder)["rejected_fraction"]
    assert finding.closes
    assert finding.summary == "no samples are left of 4 images: 3 filter_min_pixels, 1 caption_missing"
    assert finding.fix.startswith("3 filter min pixels, the first is d/0.png: change filters.min_pixels")


def test_a_size_other_than_the_scanned_one_closes_the_gate(folder: Any) -> None:
    folder.add("a.png")
    table = folder.ingest().table
    folder.tables.write("validated_dataset", table.with_columns(height=pl.col("height") + 1))
    assert closed(checked(validated_dataset, folder)) == ["shape_uniformity"]


def test_I20_files_changed_after_validation_close_the_gate_but_a_new_time_alone_does_not(
    folder: Any,
) -> None:
    same, other, deleted = (
        folder.add("same.bmp"),
        folder.add("other.bmp", folder.picture(1, kind="BMP")),
        folder.add("gone.png"),
    )
    folder.ingest()
    os.utime(same, ns=(1, 1))
    assert closed(checked(validated_dataset, folder)) == []
    other.write_bytes(folder.picture(2, kind="BMP"))
    deleted.unlink()
    findings = checked(validated_dataset, folder)
    assert closed(findings) == ["file_size_outliers"]
    gone, changed = findings["file_size_outliers"].rows
    assert (gone["sample_id"], changed["sample_id"]) == ("d/gone.png", "d/other.bmp")
    assert gone["reason"].startswith(f"vanished: the file no longer exists\n  where: {deleted}")
    assert changed["reason"] == "changed: the same number of bytes, but other content"


def test_I20_a_file_emptied_after_validation_closes_the_gate(folder: Any) -> None:
    emptied = folder.add("a.png")
    num_bytes = emptied.stat().st_size
    folder.ingest()
    emptied.write_bytes(b"")
    finding = checked(validated_dataset, folder)["file_size_outliers"]
    assert finding.closes
    reason = f"changed: 0 bytes, {num_bytes:,} at the scan"
    assert finding.rows == [{"sample_id": "d/a.png", "reason": reason}]


def test_B01_a_sample_missing_from_the_buckets_closes_the_gate(folder: Any, tiny_sd: Path) -> None:
    folder.model = str(tiny_sd)
    folder.add("a.png")
    folder.add("b.png")
    folder.ingest()
    table = folder.assign().table
    folder.tables.write("aspect_buckets", table.head(1))
    assert closed(checked(aspect_buckets, folder)) == ["conservation"]


@pytest.mark.parametrize(
    "change",
    [
        {"target_height": pl.lit(44, pl.Int32), "bucket": pl.lit("44x80")},
        {"bucket": pl.lit("80x48")},
        {"crop_top": pl.lit(-1, pl.Int32)},
        {"crop_left": pl.lit(-1, pl.Int32)},
        {"crop_top": pl.col("resized_height") - pl.col("target_height") + 1},
        {"crop_left": pl.col("resized_width") - pl.col("target_width") + 1},
    ],
    ids=["bucket of 44 px", "another bucket", "above", "to the left", "below", "to the right"],
)
def test_B03_sizes_that_differ_from_the_bucket_or_are_not_divisible_close_the_gate(
    folder: Any, tiny_sd: Path, change: dict[str, pl.Expr]
) -> None:
    folder.model = str(tiny_sd)
    folder.add("a.png")
    folder.ingest()
    table = folder.assign().table
    assert closed(checked(aspect_buckets, folder)) == []
    folder.tables.write("aspect_buckets", table.with_columns(**change))
    assert closed(checked(aspect_buckets, folder)) == ["shape_uniformity"]


def test_a_closed_gate_lists_the_most_frequent_reasons_with_count_and_fix(folder: Any) -> None:
    folder.add("good.png")
    for index in range(3):
        folder.add(f"empty{index}.png", b"")
    for index in range(2):
        folder.add(f"words{index}.png", b"these are only words")
    folder.add("cut.bmp", folder.picture(1, kind="BMP")[:1000])
    folder.add("bare.png", caption=None)
    folder.ingest()
    finding = checked(validated_dataset, folder)["rejected_fraction"]
    first, second, third, rest, otherwise = finding.fix.splitlines()
    assert first.startswith("3 empty file, the first is d/empty0.png: ")
    assert second.startswith("2 not an image, the first is d/words0.png: ")
    assert third.startswith("1 caption missing, the first is d/bare.png: ")
    assert rest == "1 for other reasons: tables/rejected.parquet has the fix of each"
    assert otherwise.startswith("or raise checks.max_rejected_fraction; or accept this knowingly")
    assert [row["reason"] for row in finding.rows[:4]] == ["empty_file"] * 3 + ["not_an_image"]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_I24_copies_and_similar_images_are_listed_without_closing_a_gate(folder: Any) -> None:
    cat = Image.fromarray(data.cat())
    folder.add("cat.png", png(cat))
    folder.add("cat copy.png", png(cat))
    folder.add("cat small.png", png(cat.resize((200, 150))))
    folder.add("coffee.png", png(Image.fromarray(data.coffee())))
    folder.ingest()
    findings = checked(validated_dataset, folder)
    assert [name for name, each in findings.items() if each.closes] == []
    similar = findings["look_alikes"]
    assert not similar.passed
    counts = "removed copies: 1; similar images: 2 in 1 group"
    assert similar.summary == f"{counts}; first: d/cat copy.png | d/cat small.png"
    copy = "same bytes and caption as d/cat copy.png, which is kept"
    assert similar.rows == [
        {"what": "look alike", "images": "d/cat copy.png | d/cat small.png"},
        {"what": "copy, left out", "images": "d/cat.png", "of": copy},
    ]
    assert findings["rejected_fraction"].numbers["rejected"] == 0
    assert folder.tables.read_rejected().filter(has_defect()).is_empty()


def test_single_colour_images_are_listed(folder: Any) -> None:
    folder.add("black.png", png(Image.new("RGB", (300, 200))))
    folder.add("coffee.png", png(Image.fromarray(data.coffee())))
    folder.ingest()
    finding = checked(validated_dataset, folder)["one_colour"]
    assert (finding.passed, finding.closes) == (False, False)
    assert finding.rows == [{"sample_id": "d/black.png", "height": 200, "width": 300}]


def test_I24_an_image_on_both_sides_of_the_split_closes_the_gate(folder: Any) -> None:
    """The stage never splits a group, so the table is edited to put one content into two groups."""
    folder.validation_fraction, folder.duplicates = 0.5, "keep_all"
    for number in range(20):
        folder.add(f"{number:02}.png", folder.picture(number))
        folder.add(f"copy of {number:02}.png", folder.picture(number))
    table = folder.ingest().table
    finding = checked(validated_dataset, folder)["validation_apart"]
    assert finding.passed
    assert 0 < finding.numbers["held_out"] < 40
    assert finding.numbers["held_out"] % 2 == 0
    wrong = (
        pl.when(pl.col("path").str.starts_with("copy")).then(pl.lit("0" * 64)).otherwise("duplicate_group")
    )
    folder.tables.write("validated_dataset", table.with_columns(duplicate_group=wrong))
    finding = checked(validated_dataset, folder)["validation_apart"]
    assert finding.closes
    assert finding.numbers["leaks"] > 0
    assert "copy of" in finding.rows[0]["images"]


def test_C03_captions_with_two_suffixes_are_recovered_by_the_fix_that_the_gate_names(folder: Any) -> None:
    for index in range(62):
        path = folder.add(f"{index:02}.png", folder.picture(index), caption=f"caption {index}")
        if index >= 54:
            path.with_suffix(".txt").rename(path.with_suffix(".caption"))

    for suffix in (".txt", ".caption"):
        folder.captions = {"suffix": suffix}
        folder.ingest()
        gate = checked(validated_dataset, folder)["captions_present"]
        fixes = re.findall(r"set captions.suffix to (\[.*?\])", gate.fix)
        assert gate.closes
        assert len(fixes) == 1
        folder.captions = {"suffix": yaml.safe_load(fixes[0])}
        assert len(folder.ingest().table) == 62
        assert closed(checked(validated_dataset, folder)) == []


def test_two_captions_of_one_image_warn_with_both_files_and_the_used_one(folder: Any) -> None:
    for name, other in (("a", "other words"), ("b", "same words"), ("c", "")):
        folder.add(f"{name}.png", caption="same  words" if name == "b" else f"words of {name}")
        (folder.root / f"{name}.caption").write_text(other)
    folder.captions = {"suffix": [".txt", ".caption"]}
    folder.ingest()
    finding = checked(validated_dataset, folder)["captions_agree"]
    assert (finding.passed, finding.severity) == (False, "warn")
    assert finding.summary.endswith("in two files: d/a.png uses a.txt, not a.caption")
    assert finding.rows == [{"sample_id": "d/a.png", "used": "a.txt", "not_used": "a.caption"}]

    folder.captions = {"suffix": [".caption", ".txt"]}
    folder.ingest()
    assert "d/a.png uses a.caption, not a.txt" in checked(validated_dataset, folder)["captions_agree"].summary
    folder.captions = {}
    folder.ingest()
    assert checked(validated_dataset, folder)["captions_agree"].passed


def test_C03_captions_from_the_fallback_are_counted(folder: Any) -> None:
    folder.add("a.png")
    folder.add("b.png", caption=None)
    folder.captions = {"fallback": "filename"}
    report = folder.ingest().report
    assert report["captions_from"] == {"fallback": 1, "sidecar": 1}
    finding = checked(validated_dataset, folder)["captions_present"]
    assert finding.passed
    assert finding.summary == "2 samples, all with a caption; 1 from captions.fallback"


def test_similar_images_with_contradicting_captions_are_named(folder: Any) -> None:
    coffee = Image.fromarray(data.coffee())
    folder.add("a.png", png(coffee), caption="a red cup on a table")
    folder.add("b.png", png(coffee.resize((300, 200))), caption="a blue cup on a table")
    # The same motif in other colours is no contradiction.
    folder.add("c.png", png(Image.fromarray(data.coffee()[..., ::-1])), caption="a green cup on a table")
    folder.ingest()
    finding = checked(validated_dataset, folder)["look_alikes_agree"]
    assert (finding.passed, finding.closes) == (False, False)
    assert finding.rows == [{"images": "d/a.png | d/b.png", "conflict": "red cup / blue cup"}]
