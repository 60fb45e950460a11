"""The checks of pictures report what was planted, from the table alone, and draw the worst images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from PIL import Image, ImageFilter
from skimage import data

from demo.picture_faults import stamp
from pipeline.images.pixel_measures import Views, corners
from pipeline.reporting.findings import CheckContext, Finding
from pipeline.reporting.pictures import THUMBNAIL_PX
from pipeline.storage.table_columns import PICTURE_COLUMNS
from pipeline.storage.tables import validated
from pipeline.validated_dataset.checks import run
from pipeline.validated_dataset.overlays import MIN_IMAGES, agreement
from pipeline.validated_dataset.picture_checks import picture_outcomes
from pipeline.validated_dataset.report import FINDINGS_FILE, write_dataset_report
from tests.pipeline.dataset_folder import Folder
from tests.pipeline.reporting.row_columns import require_columns

PHOTOS = {
    name: Image.fromarray(getattr(data, name)()).convert("RGB").resize((200, 150), Image.Resampling.LANCZOS)
    for name in ("astronaut", "coffee", "cat", "rocket", "camera")
}
CHECKS = ("pictures_sharp", "pictures_exposed", "pictures_unframed", "views_varied", "subjects_visible")


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def photos(folder: Folder) -> Folder:
    for name, photo in PHOTOS.items():
        folder.add(f"{name}.png", saved(photo), caption=f"a picture of {name}")
    return folder


def checked(folder: Folder) -> dict[str, Finding]:
    findings = run(CheckContext(folder.recipe, folder.tables))
    require_columns(findings)
    return {finding.name: finding for finding in findings if finding.name in CHECKS}


def test_faults_are_named_with_their_value_and_shown_on_a_sheet(photos: Folder) -> None:
    framed = PHOTOS["coffee"].copy()
    framed.paste("black", (0, 0, 200, 20))
    photos.add("blurred.png", saved(PHOTOS["astronaut"].filter(ImageFilter.GaussianBlur(6))))
    photos.add("compressed.jpg", saved(PHOTOS["rocket"], "JPEG", quality=20))
    photos.add("dark.png", saved(PHOTOS["camera"].point(lambda level: level // 4)))
    photos.add("flat.png", saved(PHOTOS["cat"].point(lambda level: 100 + level // 5)))
    photos.add("white.png", saved(PHOTOS["coffee"].point(lambda level: min(255, level * 4))))
    photos.add("framed.png", saved(framed))
    result = photos.ingest()
    findings = checked(photos)
    # Changed copies of a photograph also show one view.
    del findings["views_varied"]
    assert {name: [row["sample_id"] for row in finding.rows] for name, finding in findings.items()} == {
        "pictures_sharp": ["d/blurred.png", "d/compressed.jpg"],
        "pictures_exposed": ["d/dark.png", "d/white.png", "d/flat.png"],
        "pictures_unframed": ["d/framed.png"],
        "subjects_visible": [],
    }
    assert findings["pictures_sharp"].rows[1]["value"] == "JPEG quality 20"
    summary = "1 image is framed by bars, worst d/framed.png (bars 13%)"
    assert findings["pictures_unframed"].summary == summary
    assert not any(finding.closes for finding in findings.values())

    report = write_dataset_report(photos.recipe, result.table, result.rejected, log=photos.log.append)
    with Image.open(report / FINDINGS_FILE) as sheet:
        assert sheet.height > 6 * THUMBNAIL_PX, "a strip for each kind"


def test_clean_photographs_have_no_findings_and_no_sheet(photos: Folder) -> None:
    result = photos.ingest()
    assert {name: finding.summary for name, finding in checked(photos).items() if not finding.passed} == {}
    report = write_dataset_report(photos.recipe, result.table, result.rejected, log=photos.log.append)
    assert not (report / FINDINGS_FILE).exists()


def test_a_view_that_many_images_show_is_named(photos: Folder) -> None:
    for number in range(3):
        moved = PHOTOS["astronaut"].crop((number * 3, 0, 191 + number * 3, 150)).resize((200, 150))
        photos.add(f"astronaut{number}.png", saved(moved))
    photos.ingest()
    finding = checked(photos)["views_varied"]
    ids = " | ".join(f"d/astronaut{name}.png" for name in ("", *range(3)))
    assert finding.rows == [{"images": ids, "number": 4}]
    assert finding.numbers == {"num_rows": 1, "views": 5, "images": 8}


def test_a_small_masked_subject_is_named(photos: Folder, tmp_path: Path) -> None:
    photos.dataset["mask"] = {"path": str(tmp_path / "masks")}
    (tmp_path / "masks").mkdir()
    for name in PHOTOS:
        mask = Image.new("L", (200, 150))
        edge = 60 if name == "cat" else 120  # of 173 pixels, which are 64 in training
        mask.paste(255, (20, 20, 20 + edge, 20 + edge))
        mask.save(tmp_path / "masks" / f"{name}.png")
    photos.ingest()
    assert checked(photos)["subjects_visible"].rows == [
        {"sample_id": "d/cat.png", "what": "small in the picture", "value": "22 px"}
    ]


def test_a_focus_point_at_an_edge_is_named(photos: Folder) -> None:
    at_edge = pl.col("sample_id") == "d/cat.png"
    table = photos.ingest().table.with_columns(focus_x=pl.when(at_edge).then(0.1).otherwise(0.5))
    outcome = picture_outcomes(photos.recipe, table)["subjects_visible"]
    assert [(row["sample_id"], row["value"]) for row in outcome.rows] == [("d/cat.png", "6 px from an edge")]


def test_a_table_of_an_older_release_is_valid_and_not_judged(photos: Folder) -> None:
    table = photos.ingest().table.drop(PICTURE_COLUMNS)
    photos.tables.write("validated_dataset", validated("validated_dataset", table, "a test"))
    findings = checked(photos)
    assert all(finding.passed for finding in findings.values())
    assert "older release" in findings["pictures_sharp"].summary
    photos.ingest()
    assert "older release" not in checked(photos)["pictures_sharp"].summary


def test_views_of_a_large_dataset_are_not_called_varied(
    photos: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.validated_dataset.duplicates.MAX_VIEWS", 3)
    photos.ingest()
    finding = checked(photos)["views_varied"]
    assert finding.passed
    assert finding.summary.startswith("not measured: more than ")


def test_an_overlay_needs_enough_different_images() -> None:
    prints = [corners(Views(stamp(image, 1.0, None))) for image in _crops(MIN_IMAGES + 4)]  # pyright: ignore[reportArgumentType] - unused
    contents = pl.DataFrame(
        {"content_hash": [f"{number:02}" for number in range(len(prints))], "corners": prints}
    )
    is_first = pl.Series([True] * len(prints))
    values = agreement(contents, is_first)
    assert values.min() > 0.5  # pyright: ignore[reportOperatorIssue, reportOptionalOperand]
    few = is_first & (pl.Series(range(len(prints))) < MIN_IMAGES - 1)
    assert agreement(contents, few).null_count() == len(prints)
    clean = contents.with_columns(corners=pl.Series([corners(Views(image)) for image in _crops(len(prints))]))
    assert agreement(clean, is_first).null_count() == len(prints)


def _crops(number: int) -> list[Image.Image]:
    """Return square crops of different places of photographs."""
    photos = [
        Image.fromarray(getattr(data, name)()).convert("RGB")
        for name in ("astronaut", "coffee", "cat", "rocket")
    ]
    crops = []
    for index in range(number):
        photo = photos[index % 4]
        left, top = (index // 4) * 40, (index // 4) * 20
        crops.append(photo.crop((left, top, left + 200, top + 200)))
    return crops
