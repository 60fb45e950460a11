from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image

from pipeline.errors import DatasetError
from pipeline.images.mask import MaskContent, read_mask
from pipeline.raw_images.manifest import paired_by_path
from pipeline.reporting.findings import CheckContext, Finding
from pipeline.reporting.reports import StageResult
from pipeline.validated_dataset.checks import run
from pipeline.validated_dataset.report import write_dataset_report
from tests.pipeline.dataset_folder import Folder

SIZE_WH = (40, 24)
"""Size of the pictures of `Folder`."""


def draw_mask(path: Path, size_wh: tuple[int, int] = SIZE_WH, *, left: int = 255, right: int = 0) -> Path:
    """Write a mask whose halves have these values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mask = Image.new("L", size_wh, right)
    mask.paste(left, (0, 0, size_wh[0] // 2, size_wh[1]))
    mask.save(path)
    return path


@pytest.fixture
def masks(folder: Folder, tmp_path: Path) -> Path:
    """Return the folder of masks of a dataset with the images a.png and sub/b.png, of which b has one."""
    folder.dataset["mask"] = {"path": str(tmp_path / "masks")}
    folder.add("a.png")
    folder.add("sub/b.png")
    draw_mask(tmp_path / "masks" / "sub" / "b.png")
    return tmp_path / "masks"


def failing(folder: Folder) -> dict[str, Finding]:
    return {each.name: each for each in run(CheckContext(folder.recipe, folder.tables)) if not each.passed}


def reasons(result: StageResult) -> dict[str, str]:
    return dict(result.rejected.select("sample_id", "reason").rows())


def test_each_image_gets_the_mask_of_its_relative_path(folder: Folder, masks: Path) -> None:
    draw_mask(masks / "a.webp", left=255, right=255)
    result = folder.ingest()
    rows = result.table.select("sample_id", "mask_path", "mask_mean").rows()
    assert rows == [("d/a.png", "a.webp", 1.0), ("d/sub/b.png", "sub/b.png", 0.5)]
    findings = failing(folder)
    assert set(findings) == {"masks_white"}
    assert findings["masks_white"].rows == [{"sample_id": "d/a.png"}]
    assert not findings["masks_white"].closes


def test_tables_and_reports_of_a_recipe_without_masks_have_no_trace_of_masks(folder: Folder) -> None:
    folder.add("a.png")
    result = folder.ingest()
    assert [name for name in (*result.table.columns, *result.report) if "mask" in name] == []
    assert "unmatched_masks" not in result.report["named"]
    assert not (folder.output_dir / "tables" / "known" / "masks.parquet").exists()


def _missing(masks: Path) -> None: ...


def _empty(masks: Path) -> None:
    (masks / "a.png").write_bytes(b"")


def _no_image(masks: Path) -> None:
    (masks / "a.png").write_bytes(b"just a text that someone called a picture")


def _truncated(masks: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (24, 40), dtype=np.uint8)
    Image.fromarray(noise).save(masks / "a.png")
    (masks / "a.png").write_bytes((masks / "a.png").read_bytes()[:400])


def _coloured(masks: Path) -> None:
    Image.new("RGB", SIZE_WH, (255, 0, 0)).save(masks / "a.png")


def _transparent(masks: Path) -> None:
    Image.new("RGBA", SIZE_WH, (255, 255, 255, 99)).save(masks / "a.png")


def _ambiguous(masks: Path) -> None:
    draw_mask(masks / "a.png")
    draw_mask(masks / "a.bmp")


def _a_pipe(masks: Path) -> None:
    os.mkfifo(masks / "a.png")


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing": (_missing, "mask_missing", "masks_present"),
    "a pipe": (_a_pipe, "mask_missing", "masks_present"),
    "two files": (_ambiguous, "mask_ambiguous", "masks_present"),
    "empty": (_empty, "mask_empty_file", "masks_usable"),
    "not an image": (_no_image, "mask_not_an_image", "masks_usable"),
    "truncated": (_truncated, "mask_truncated", "masks_usable"),
    "another size": (lambda masks: draw_mask(masks / "a.png", (20, 12)), "mask_size", "masks_usable"),
    "rotated": (lambda masks: draw_mask(masks / "a.png", (24, 40)), "mask_orientation", "masks_usable"),
    "black": (lambda masks: draw_mask(masks / "a.png", left=0), "mask_black", "masks_usable"),
    "zeros and ones": (lambda masks: draw_mask(masks / "a.png", left=1), "mask_black", "masks_usable"),
    "coloured": (_coloured, "mask_not_grey", "masks_usable"),
    "transparent": (_transparent, "mask_transparent", "masks_usable"),
}
"""Mistakes in the mask of a.png, with the reason of its rejection and the gate that closes."""


@pytest.mark.parametrize("name", BROKEN)
def test_an_image_with_a_broken_mask_is_rejected_with_a_fix_and_closes_a_gate(
    folder: Folder, masks: Path, name: str
) -> None:
    break_mask, reason, gate = BROKEN[name]
    break_mask(masks)
    result = folder.ingest()
    assert reasons(result) == {"d/a.png": reason}
    assert result.table["sample_id"].to_list() == ["d/sub/b.png"]
    assert result.rejected["fix"][0]
    finding = failing(folder)[gate]
    assert finding.closes
    assert finding.rows[0]["sample_id"] == "d/a.png"
    assert result.rejected["detail"][0] in finding.summary


def test_images_that_share_a_mask_are_rejected(folder: Folder, masks: Path) -> None:
    folder.add("a.webp", folder.picture(kind="WEBP"))
    draw_mask(masks / "a.png")
    assert reasons(folder.ingest()) == dict.fromkeys(["d/a.png", "d/a.webp"], "mask_shared")


def test_E06_a_mask_without_an_image_closes_a_gate(folder: Folder, masks: Path) -> None:
    draw_mask(masks / "a.png")
    draw_mask(masks / "rose.png")
    assert folder.ingest().report["unmatched_masks"] == 1
    finding = failing(folder)["masks_matched"]
    assert finding.closes
    assert finding.rows == [{"mask": "d/rose.png"}]


def test_a_missing_folder_of_masks_is_an_error(folder: Folder, tmp_path: Path) -> None:
    folder.dataset["mask"] = {"path": str(tmp_path / "nowhere")}
    folder.add("a.png")
    folder.scan()
    with pytest.raises(DatasetError, match="nowhere"):
        folder.validate()


@pytest.mark.parametrize("suffix", ["", "-masklabel"])
def test_masks_inside_the_dataset_are_not_images(folder: Folder, suffix: str) -> None:
    path = folder.root if suffix else folder.root / "masks"
    folder.dataset["mask"] = {"path": str(path), "suffix": suffix}
    folder.add("a.png")
    folder.add("sub/b.png")
    for stem in ("a", "sub/b"):
        draw_mask(path / f"{stem}{suffix}.png")
    result = folder.ingest()
    assert result.table["mask_path"].to_list() == [f"a{suffix}.png", f"sub/b{suffix}.png"]
    assert failing(folder) == {}


def test_the_opacity_of_images_is_their_mask(folder: Folder) -> None:
    folder.dataset["mask"] = {"from": "alpha"}
    path = folder.add("a.png")
    folder.add("b.png")
    with Image.open(path) as image:
        image.putalpha(Image.new("L", image.size, 51))
        image.save(path)
    result = folder.ingest()
    assert result.table.select("mask_path", "mask_mean").rows() == [("a.png", 0.2)]
    assert result.table["mask_hash"].to_list() == result.table["content_hash"].to_list()
    assert reasons(result) == {"d/b.png": "mask_alpha_missing"}


def test_a_manifest_names_the_masks(folder: Folder, tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png", "e.png"):
        folder.add(name)
    draw_mask(folder.root / "m" / "one.png")
    draw_mask(tmp_path / "outside.png")
    manifest = folder.root / "list.csv"
    lines = ["path,caption,m", "a.png,one,m/one.png", "b.png,two,", "c.png,three,m/none.png"]
    manifest.write_text("\n".join([*lines, "e.png,four,m/../../outside.png"]), encoding="utf-8")
    folder.captions["from"] = "column"
    folder.dataset |= {"path": str(manifest), "mask": {"column": "m"}}
    result = folder.ingest()
    assert result.table.select("sample_id", "mask_path").rows() == [("d/a.png", "m/one.png")]
    assert reasons(result) == {
        "d/b.png": "mask_missing",
        "d/c.png": "mask_not_found",
        "d/e.png": "mask_outside_dataset",
    }


def test_rows_that_the_filter_excludes_name_no_masks(folder: Folder) -> None:
    folder.add("a.png")
    draw_mask(folder.root / "m" / "old.png")
    draw_mask(folder.root / "m" / "new.png")
    lines = ["path,caption,m,version", "a.png,old,m/old.png,1", "a.png,new,m/new.png,2"]
    (folder.root / "list.csv").write_text("\n".join(lines), encoding="utf-8")
    folder.captions["from"] = "column"
    folder.dataset |= {"path": str(folder.root / "list.csv"), "mask": {"column": "m"}}
    folder.dataset["filters"] = {"where": "version = 2"}
    assert folder.ingest().table.select("caption", "mask_path").rows() == [("new", "m/new.png")]


def test_the_recipes_limit_of_a_file_applies_to_a_manifest_with_masks(folder: Folder) -> None:
    folder.add("a.png")
    (folder.root / "list.csv").write_text("path,m\na.png,m.png\n", encoding="utf-8")
    folder.dataset |= {"path": str(folder.root / "list.csv"), "mask": {"column": "m"}}
    [settings] = folder.recipe.datasets
    assert paired_by_path(settings, "m", max_bytes=19) == {"a.png": "m.png"}
    with pytest.raises(DatasetError, match="at most 18 bytes"):
        paired_by_path(settings, "m", max_bytes=18)


def test_images_with_equal_bytes_and_other_masks_are_no_copies(folder: Folder, masks: Path) -> None:
    folder.add("c.png", (folder.root / "a.png").read_bytes())
    draw_mask(masks / "a.png")
    draw_mask(masks / "c.png", left=0, right=255)
    assert folder.ingest().table["sample_id"].to_list() == ["d/a.png", "d/c.png", "d/sub/b.png"]
    draw_mask(masks / "c.png")
    assert reasons(folder.ingest()) == {"d/c.png": "duplicate"}


def test_only_changed_masks_are_read_again(
    folder: Folder, masks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.validated_dataset.paired_files.CLOCK_GRANULARITY_NS", -(10**18))
    draw_mask(masks / "a.png")
    first = folder.ingest().table
    read = count_reads(monkeypatch)
    assert folder.validate().table.equals(first)
    assert read == []
    draw_mask(masks / "a.png", left=128)
    again = folder.validate().table
    assert len(read) == 1
    changed = again.filter(pl.col("mask_hash") != first["mask_hash"])
    assert changed["sample_id"].to_list() == ["d/a.png"]


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows with each mask that is read."""
    read: list[Any] = []

    def counting(*args: Any, **options: Any) -> MaskContent:
        read.append(args)
        return read_mask(*args, **options)

    monkeypatch.setattr("pipeline.side_inputs.masks.read_mask", counting)
    return read


def test_the_checks_refuse_tables_from_before_the_recipe_had_masks(folder: Folder, tmp_path: Path) -> None:
    folder.add("a.png")
    folder.ingest()
    draw_mask(tmp_path / "masks" / "a.png")
    folder.dataset["mask"] = {"path": str(tmp_path / "masks")}
    assert failing(folder)["masks_present"].closes


def test_the_report_shows_masks_over_images(folder: Folder, masks: Path) -> None:
    draw_mask(masks / "a.png", left=255, right=0)
    result = folder.ingest()
    reports = write_dataset_report(folder.recipe, result.table, result.rejected, log=lambda _: None)
    with Image.open(reports / "masks.jpg") as sheet:
        assert sheet.format == "JPEG"
        before = np.asarray(sheet).astype(int)
    draw_mask(masks / "a.png", left=0, right=255)
    result = folder.validate()
    write_dataset_report(folder.recipe, result.table, result.rejected, log=lambda _: None)
    with Image.open(reports / "masks.jpg") as sheet:
        assert np.abs(np.asarray(sheet).astype(int) - before).max() > 40
