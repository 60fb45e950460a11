"""The checks of raw_images on tables, rejected rows and reports, each with its rows, numbers and limits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.raw_images import checks
from pipeline.recipe import recipe_from_mapping
from pipeline.reporting.findings import CheckContext, Finding
from pipeline.storage.tables import REJECTED, SCHEMAS, Tables, frame

Row = dict[str, Any]

BLANK: Row = {name: "" if kind == pl.String else 0 for name, kind in SCHEMAS["raw_images"].items()}


def image(sample_id: str = "d/a.png", **values: object) -> Row:
    """Return a row of raw_images for a PNG of 10 x 20 pixels."""
    dataset, _, path = sample_id.partition("/")
    usual = {"height": 10, "width": 20, "channels": 3, "mode": "RGB", "format": "PNG", "file_bytes": 100}
    return {**BLANK, **usual, "sample_id": sample_id, "dataset": dataset, "path": path, **values}


def rejection(sample_id: str, reason: str, detail: str = "", fix: str = "") -> Row:
    dataset, _, path = sample_id.partition("/")
    values = {"sample_id": sample_id, "dataset": dataset, "path": path, "reason": reason}
    return {**dict.fromkeys(REJECTED, ""), **values, "detail": detail, "fix": fix}


class Scan:
    """The result of a scan of the datasets d and e, and the findings of the checks on it."""

    def __init__(self, folder: Path) -> None:
        self.recipe = recipe_from_mapping(
            "small",
            {
                "datasets": [{"name": name, "path": str(folder / name)} for name in "de"],
                "cache_dir": str(folder / "cache"),
                "output_dir": str(folder / "out"),
                "model": {"base": "no model"},
            },
        )

    def finding(
        self, name: str, images: Iterable[Row], rejected: Iterable[Row] = (), report: Row | None = None
    ) -> Finding:
        tables = Tables(self.recipe.output_dir)
        tables.write("raw_images", frame("raw_images", list(images)))
        tables.write_rejected("raw_images", pl.DataFrame(list(rejected), schema=REJECTED))
        context = CheckContext(self.recipe, tables, {"raw_images": report} if report else {})
        return next(each for each in checks.run(context) if each.name == name)


@pytest.fixture
def scan(tmp_path: Path) -> Scan:
    return Scan(tmp_path)


BOTH = [image("d/a.png"), image("e/a.png")]
"""One image in each dataset."""


def test_each_dataset_with_an_image_counts(scan: Scan) -> None:
    finding = scan.finding("images_found", [*BOTH, image("d/b.png")])
    assert (finding.passed, finding.summary) == (True, "3 images in 2 datasets")
    assert finding.numbers == {"num_rows": 0, "images": 3}


def test_every_dataset_without_images_is_listed_and_the_summary_has_the_first(scan: Scan) -> None:
    counts = {"passed_over": {"hidden": 2, "captions": 1000}, "suffixes_of_no_images": {"mp4": 3, "": 1}}
    finding = scan.finding("images_found", [], report={"datasets": {"d": counts, "e": {}}})
    d, e = (str(dataset.path) for dataset in scan.recipe.datasets)
    assert not finding.passed
    assert finding.summary == (
        f"dataset d has no images: searched {d} and its subfolders; ignored: 2 hidden, 1,000 captions; "
        "other suffixes: 3 mp4, 1 (none)"
    )
    assert finding.rows == [
        {
            "dataset": "d",
            "searched": d,
            "rejected": 0,
            "passed_over": "2 hidden, 1,000 captions",
            "other_suffixes": "3 mp4, 1 (none)",
        },
        {"dataset": "e", "searched": e, "rejected": 0, "passed_over": "", "other_suffixes": ""},
    ]
    assert finding.numbers == {"num_rows": 2, "images": 0}


def test_without_a_report_an_empty_dataset_was_searched(scan: Scan) -> None:
    finding = scan.finding("images_found", [image("d/a.png")])
    assert not finding.passed
    path = scan.recipe.datasets[1].path
    searched = f"searched {path} and its subfolders"
    assert finding.summary == f"dataset e has no images: {searched}; ignored: nothing, the folder is empty"


def test_a_dataset_that_the_report_lacks_was_added_after_the_scan(scan: Scan) -> None:
    finding = scan.finding("images_found", [image("d/a.png")], report={"datasets": {"d": {}}})
    assert not finding.passed
    assert finding.summary == "dataset e has no images: it was added to the recipe after the last scan"
    assert [row["dataset"] for row in finding.rows] == ["e"]
    assert finding.numbers == {"num_rows": 1, "images": 1}


def test_a_dataset_whose_images_are_all_rejected_shows_the_most_frequent_reason(scan: Scan) -> None:
    rejected = [
        rejection("d/a.png", "undecodable", "cut off", "export it again"),
        rejection("d/b.png", "not_an_image", "these are words", "remove it"),
        rejection("d/c.png", "not_an_image", "this is HTML", "remove it"),
        rejection("d/d.png", "empty_file", "0 bytes", "copy it again"),
        *(rejection(f"e/{number}.png", "empty_file", "0 bytes", "copy it again") for number in range(5)),
    ]
    finding = scan.finding("images_found", [image("e/a.png")], rejected)
    counts = "2 not an image, 1 empty file, 1 undecodable"
    assert not finding.passed
    assert finding.summary.endswith(f"all files were rejected: {counts}; b.png: these are words")
    assert finding.fix.startswith("2 not an image, the first is d/b.png: remove it\n1 empty file, ")
    assert [(row["dataset"], row["rejected"]) for row in finding.rows] == [("d", 4)]


def test_names_that_differ_in_case_are_grouped_in_the_order_of_the_table(scan: Scan) -> None:
    groups: list[tuple[str, ...]] = [(f"d/X{number:02}.png", f"d/x{number:02}.png") for number in range(30)]
    groups.append(("d/ONE.png", "d/One.png", "d/one.png"))
    finding = scan.finding("names_distinct", [image(name) for group in groups for name in group])
    assert not finding.passed
    ordered = [" | ".join(group) for group in sorted(groups)]
    assert [(row["names"], row["differ_in"]) for row in finding.rows] == [(each, "case") for each in ordered]
    assert finding.summary.startswith("31 groups of names differ only in case or Unicode form")


def test_names_that_differ_in_unicode_form_are_those_rejected_for_it(scan: Scan) -> None:
    rejected = [rejection("d/b.png", "name_collision", "b and c"), rejection("d/e.png", "empty_file", "0")]
    finding = scan.finding("names_distinct", BOTH, rejected)
    assert finding.rows == [{"names": "b and c", "differ_in": "Unicode form"}]
    assert scan.finding("names_distinct", BOTH, rejected[1:]).passed


def test_a_scan_is_complete_if_kept_and_rejected_images_add_up_to_those_found(scan: Scan) -> None:
    rejected = [rejection("d/c.png", "empty_file")]
    numbers = {"num_rows": 0, "kept": 2, "rejected": 1}
    for report in ({"in": 3}, None):
        finding = scan.finding("conservation", BOTH, rejected, report)
        assert (finding.passed, finding.summary) == (True, "3 found = 2 kept + 1 rejected")
        assert finding.numbers == {**numbers, "in": 3}
    for found in (1, 2, 4):
        finding = scan.finding("conservation", BOTH, rejected, {"in": found})
        assert not finding.passed
        assert finding.rows == []
        assert finding.numbers == {**numbers, "in": found}


def test_images_that_are_both_kept_and_rejected_are_listed_by_name(scan: Scan) -> None:
    images = [image(f"d/{name}.png") for name in "abc"]
    rejected = [rejection(f"d/{name}.png", "empty_file") for name in "cax"]
    finding = scan.finding("conservation", images, rejected, {"in": 6})
    assert not finding.passed
    assert finding.rows == [
        {"sample_id": f"d/{name}.png", "problem": "kept and rejected"} for name in ("a", "c")
    ]


def test_an_image_has_1_to_4_channels_and_may_have_a_single_pixel(scan: Scan) -> None:
    valid = [(1, 1, 1), (1, 1, 4), (9, 1, 2), (1, 9, 3)]
    invalid = [(9, 9, 0), (9, 8, 5), (8, 9, -1), (0, 9, 3), (9, 0, 3), (-1, 9, 3)]
    images = [
        image(f"d/{number}.png", height=height, width=width, channels=channels, mode="L")
        for number, (height, width, channels) in enumerate([*valid, *invalid])
    ]
    finding = scan.finding("shape_uniformity", images)
    assert not finding.passed
    assert finding.rows == [
        {"sample_id": f"d/{number}.png", "height": height, "width": width, "channels": channels, "mode": "L"}
        for number, (height, width, channels) in enumerate(invalid, start=len(valid))
    ]
    assert finding.numbers == {"num_rows": len(invalid), "modes": {"L": 10}}
    passed = scan.finding("shape_uniformity", [*images[: len(valid)], image("d/rgb.png")])
    assert passed.passed
    assert passed.numbers == {"num_rows": 0, "modes": {"L": 4, "RGB": 1}}


def test_bytes_per_pixel_are_compared_within_a_dataset_and_format(scan: Scan) -> None:
    """Of 9 images of 300 pixels, 8 have 100 bytes and one has 1000; eight images are enough to judge."""
    same = [image(f"d/{number}.png", height=15, width=20) for number in range(6)]
    same += [image("d/high.png", height=300, width=1), image("d/wide.png", height=1, width=300)]
    odd = image("d/odd.png", height=15, width=20, file_bytes=1000)
    others = [image(f"e/{number}.png", file_bytes=9**number) for number in range(7)]
    other_format = [image("d/a.jpg", format="JPEG", file_bytes=9000)]

    finding = scan.finding("file_size_outliers", [*same, odd, *others, *other_format])
    assert not finding.passed
    assert finding.rows == [
        {"sample_id": "d/odd.png", "format": "PNG", "bytes_per_pixel": 3.3333, "median": 0.3333}
    ]
    assert finding.numbers == {"num_rows": 1, "judged": 9, "not_judged": 8}

    passed = scan.finding("file_size_outliers", [*same, *others])
    assert passed.passed
    assert passed.numbers == {"num_rows": 0, "judged": 8, "not_judged": 7}


SUFFIXES = {
    "JPEG": "jpg jpeg jpe jfif",
    "MPO": "jpg jpeg jpe jfif mpo",
    "PNG": "png apng",
    "WEBP": "webp",
    "AVIF": "avif",
    "BMP": "bmp dib",
    "TIFF": "tif tiff",
    "GIF": "gif",
    "JPEG2000": "jp2 j2k",
    "HEIF": "heic heif hif",
    "JXL": "jxl",
}


def test_usual_suffixes_of_a_format_in_any_case_are_not_listed(scan: Scan) -> None:
    images = [
        image(f"d/{image_format}.{spelled}", format=image_format)
        for image_format, suffixes in SUFFIXES.items()
        for suffix in suffixes.split()
        for spelled in (suffix, suffix.upper())
    ]
    finding = scan.finding("oddities", images)
    assert finding.rows == []
    assert finding.passed


def test_only_the_last_suffix_of_a_name_counts_and_a_dot_file_has_none(scan: Scan) -> None:
    names = ["d/a.jpg", "d/a.png.txt", "d/b", "d/png", "d/sub.png/.png", "d/sub.png/c"]
    finding = scan.finding("oddities", [image(name) for name in [*names, "d/a.txt.png"]])
    detail = "its content is PNG"
    assert finding.rows == [{"what": "wrong suffix", "path": name, "detail": detail} for name in names]


ODD_IMAGES = [image("d/a.jpg"), image("d/b.png", notes="colour_profile animated")]


def test_each_unusual_file_is_listed_with_its_kind_and_counted(scan: Scan) -> None:
    kinds = ("links_out", "foreign_caches", "captions_without_image")
    named = {"links_out": ["d/l.png"], "foreign_caches": ["d/f.npz"], "captions_without_image": ["d/c.txt"]}
    finding = scan.finding("oddities", ODD_IMAGES, report={**dict.fromkeys(kinds, 1), "named": named})
    assert not finding.passed
    assert finding.summary == (
        "unusual files: 1 wrong suffix, 1 animated, 1 converted from profile, 1 links out, 1 foreign cache, "
        "1 caption without image"
    )
    assert finding.rows == [
        {"what": "wrong suffix", "path": "d/a.jpg", "detail": "its content is PNG"},
        {"what": "animated", "path": "d/b.png", "detail": "only the first frame is used"},
        {"what": "leads out", "path": "d/l.png", "detail": "a link that leads out of the dataset"},
        {
            "what": "foreign cache",
            "path": "d/f.npz",
            "detail": "ignored: probably another trainer's cache",
        },
        {"what": "lonely caption", "path": "d/c.txt", "detail": "a caption file without an image"},
    ]
    counts = dict.fromkeys(("wrong_suffix", "animated", "converted_from_profile", *kinds), 1)
    assert finding.numbers == {"num_rows": 5, **counts}

    several = scan.finding("oddities", ODD_IMAGES, report={**dict.fromkeys(kinds, 2), "named": named})
    assert several.summary.endswith("2 links out, 2 foreign caches, 2 captions without image")


def test_without_a_report_only_the_table_is_searched_for_unusual_files(scan: Scan) -> None:
    finding = scan.finding("oddities", ODD_IMAGES)
    assert [row["path"] for row in finding.rows] == ["d/a.jpg", "d/b.png"]
    others = dict.fromkeys(("links_out", "foreign_caches", "captions_without_image"), 0)
    counts = {"wrong_suffix": 1, "animated": 1, "converted_from_profile": 1, **others}
    assert finding.numbers == {"num_rows": 2, **counts}
    passed = scan.finding("oddities", BOTH)
    assert (passed.passed, passed.summary) == (True, "the datasets contain nothing unusual")
    assert passed.numbers == {"num_rows": 0, **dict.fromkeys(counts, 0)}
