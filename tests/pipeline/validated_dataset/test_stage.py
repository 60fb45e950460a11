"""Validation decodes each content once, attaches captions, and notices files changed since the scan."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import skimage
from PIL import Image

from pipeline.errors import DatasetError
from pipeline.images import formats as image_formats
from pipeline.images.decode import decode, load_pixels
from pipeline.images.geometry import Geometry
from pipeline.validated_dataset.stage import funnel_rows, funnel_text
from tests.pipeline.images.tiffs import grey_tiff
from tests.pipeline.pixels import stored_png

PHOTO = Path(skimage.__file__).parent / "data" / "rocket.jpg"


def reasons(result: Any) -> dict[str, str]:
    return dict(result.rejected.select("sample_id", "reason").rows())


def test_kept_samples_have_a_caption_and_its_source(folder: Any) -> None:
    folder.add("sub/a.png", caption=" a \r\nb ")
    (row,) = folder.ingest().table.rows(named=True)
    assert (row["caption"], row["caption_from"]) == ("a\nb", "sidecar:sub/a.txt")
    assert (row["height"], row["width"]) == (24, 40)


def test_I01_a_truncated_photograph_passes_the_scan_and_is_rejected_by_validation(folder: Any) -> None:
    folder.add("good.jpg", PHOTO.read_bytes())
    folder.add("bad.jpg", PHOTO.read_bytes()[:50_000])
    result = folder.ingest()
    assert len(folder.tables.read("raw_images")) == 2
    assert reasons(result) == {"d/bad.jpg": "truncated"}
    assert (result.report["in"], result.report["kept"], result.report["rejected"]) == (2, 1, 1)


def test_bad_captions_are_rejected_with_their_reason(folder: Any) -> None:
    folder.add("good.png")
    folder.add("missing.png", caption=None)
    folder.add("empty.png", caption=" \n")
    folder.add("windows.png", caption=b"na\xefve")
    result = folder.ingest()
    assert reasons(result) == {
        "d/missing.png": "caption_missing",
        "d/empty.png": "caption_empty",
        "d/windows.png": "caption_undecodable",
    }
    assert [fix for fix in result.rejected["fix"] if len(fix) <= 5] == []


def test_C01_one_malformed_caption_does_not_stop_the_others(
    folder: Any,
) -> None:
    folder.captions = {"suffix": ".json", "shuffle": {"variants": 2}}
    for name, data in {
        "good": '{"caption": "a, b"}',
        "half": r'{"caption": "\ud83d, b"}',
        "deep": "[" * 200_000,
    }.items():
        folder.add(f"{name}.png", caption=None).with_suffix(".json").write_text(data, encoding="utf-8")
    result = folder.ingest()
    assert result.table["path"].to_list() == ["good.png"]
    assert reasons(result) == {"d/half.png": "caption_undecodable", "d/deep.png": "caption_undecodable"}
    details = result.rejected.select(pl.col("path").str.replace("png", "json"), "detail").rows()
    assert [detail for name, detail in details if name not in detail] == [], "details must name their file"


def test_I16_two_images_with_the_same_stem_share_a_caption_and_are_kept(folder: Any) -> None:
    folder.add("x.png", folder.picture(1))
    folder.add("x.bmp", folder.picture(2, kind="BMP"))
    assert set(folder.ingest().table["caption_from"]) == {"sidecar:x.txt"}


def test_each_content_is_decoded_only_once(folder: Any) -> None:
    folder.add("a.png", folder.picture(1))
    folder.add("copy.png", folder.picture(1))
    folder.add("b.png", folder.picture(2))
    folder.add("bad.jpg", PHOTO.read_bytes()[:50_000])
    folder.add("uncaptioned.png", folder.picture(3), caption=None)
    first = folder.ingest()
    assert (first.report["decoded"], first.report["known"]) == (4, 0)
    again = folder.ingest()
    assert (again.report["decoded"], again.report["known"]) == (0, 4)
    assert again.table.equals(first.table)
    assert again.rejected.equals(first.rejected)


def test_filtered_images_are_not_counted_as_known(folder: Any) -> None:
    folder.add("a.png", folder.picture(1))
    folder.add("small.png", folder.picture(2, 16, 16))
    folder.dataset = {"filters": {"min_width": 20}}
    numbers = [(each.report["decoded"], each.report["known"]) for each in (folder.ingest(), folder.ingest())]
    assert numbers == [(1, 0), (0, 1)]


def test_I23_a_repaired_image_and_an_added_caption_are_accepted(folder: Any) -> None:
    folder.add("good.png")
    path = folder.add("bad.jpg", PHOTO.read_bytes()[:50_000])
    folder.add("uncaptioned.png", caption=None)
    assert len(folder.ingest().rejected) == 2
    path.write_bytes(PHOTO.read_bytes())
    (folder.root / "uncaptioned.txt").write_text("now it has one")
    result = folder.ingest()
    assert len(result.rejected) == 0
    assert result.report["decoded"] == 1


def test_a_moved_image_is_not_decoded_again(folder: Any) -> None:
    folder.add("a.png").rename(folder.root / "gone.png")
    folder.ingest()
    (folder.root / "gone.png").rename(folder.root / "a.png")
    assert folder.ingest().report["kept"] == 1
    (folder.root / "a.png").rename(folder.root / "b.png")
    (folder.root / "a.txt").rename(folder.root / "b.txt")
    assert folder.ingest().report["decoded"] == 0


def test_a_new_decoder_version_decodes_every_image_again(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.add("a.png")
    folder.add("bad.jpg", PHOTO.read_bytes()[:50_000])
    folder.ingest()
    monkeypatch.setattr("pipeline.images.decode.DECODER", "another")
    assert folder.ingest().report["decoded"] == 2


def test_a_new_plug_in_version_decodes_only_its_own_format_again(
    folder: Any, settled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer plug-in may open a photograph that an older one could not."""
    heif = pytest.importorskip("pillow_heif")
    file = io.BytesIO()
    heif.from_pillow(Image.open(io.BytesIO(folder.picture(1, 64, 64)))).save(file)
    folder.add("a.png")
    folder.add("bad.jpg", PHOTO.read_bytes()[:50_000])
    folder.add("whole.heic", file.getvalue())
    folder.add("torn.heic", file.getvalue()[:-50])
    folder.add("newer.heic", b"\0\0\0\x18ftypheic" + bytes(40))
    settled()

    def work() -> tuple[int, int]:
        """Scan and validate; return the numbers of files read and contents decoded."""
        return folder.scan().report["read"], folder.validate().report["decoded"]

    assert work() == (5, 4)
    assert work() == (0, 0)
    with monkeypatch.context() as other:
        other.setattr("pipeline.images.formats.plugin_version", image_formats.plugin_version.__wrapped__)
        other.setattr("pipeline.images.decode.plugin_version", image_formats.plugin_version)
        other.setattr("pipeline.images.formats.metadata.version", lambda package: "0.1")
        assert work() == (3, 2)
        assert work() == (0, 0)
    assert work() == (3, 2)


def test_plug_ins_are_not_searched_if_no_image_needs_one(
    folder: Any, settled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search reads every folder of installed packages."""

    def fail_search(package: str) -> str:
        raise AssertionError(package)

    folder.add("a.png")
    monkeypatch.setattr("pipeline.images.formats.metadata.version", fail_search)
    image_formats.plugin_version.cache_clear()
    folder.ingest()
    settled()
    assert (folder.scan().report["read"], folder.validate().report["decoded"]) == (0, 0)


@pytest.mark.parametrize("known", [False, True])
def test_I20_files_deleted_or_changed_between_the_stages_are_rejected(folder: Any, known: bool) -> None:
    folder.add("good.png")
    vanished, changed = folder.add("vanished.png"), folder.add("changed.bmp", folder.picture(1, kind="BMP"))
    if known:
        folder.ingest()
    folder.scan()
    vanished.unlink()
    stat = changed.stat()
    changed.write_bytes(folder.picture(2, kind="BMP"))
    if not known:  # even with its old time: the content is compared when it is decoded
        os.utime(changed, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    result = folder.validate()
    assert reasons(result) == {"d/vanished.png": "vanished", "d/changed.bmp": "changed"}
    result = folder.ingest()
    assert reasons(result) == {}
    assert set(result.table["sample_id"]) == {"d/good.png", "d/changed.bmp"}


@pytest.mark.parametrize("known", [False, True])
def test_files_with_the_content_of_the_scan_but_another_time_are_kept(folder: Any, known: bool) -> None:
    """Another machine has scanned its own copy of the dataset."""
    copy = folder.add("copy.png")
    if known:
        folder.ingest()
    folder.scan()
    os.utime(copy, ns=(1, 1))
    result = folder.validate()
    assert reasons(result) == {}
    assert set(result.table["sample_id"]) == {"d/copy.png"}


def test_I20_if_one_of_two_equal_files_is_deleted_the_other_is_decoded(folder: Any) -> None:
    first = folder.add("a.png", folder.picture(1))
    folder.add("b.png", folder.picture(1))
    folder.scan()
    first.unlink()
    result = folder.validate()
    assert reasons(result) == {"d/a.png": "vanished"}
    assert result.table["sample_id"].to_list() == ["d/b.png"]


def test_I14_the_recipes_pixel_limit_also_applies_to_decoding(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit above the default lets a large image pass all stages."""
    monkeypatch.setattr("pipeline.images.decode.MAX_IMAGE_PX", 100)
    monkeypatch.setitem(decode.__kwdefaults__, "max_px", 100)
    folder.add("large.png", folder.picture(2, 40, 50))
    folder.checks = {"max_image_pixels": 2000}
    (row,) = folder.ingest().table.rows(named=True)
    (placed,) = folder.assign().table.rows(named=True)
    geometry = Geometry.from_row(placed)
    pixels = load_pixels(folder.root / row["path"], geometry, (0, 0, 0), content_hash=row["content_hash"])
    assert pixels.shape == (*geometry.target_size, 3)


OF_A_CODEC = f"{Image.core.getcodecstatus(-9)} when reading image file"
"""The error that Pillow raises if a C decoder has too little memory."""


@pytest.mark.parametrize("error", [MemoryError(), OSError(OF_A_CODEC)], ids=repr)
def test_an_image_that_ran_out_of_memory_is_tried_again(
    folder: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    folder.add("a.png")

    def out_of_memory(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as scarce:
        scarce.setattr("pipeline.images.colour.to_srgb", out_of_memory)
        result = folder.ingest()
    assert reasons(result) == {"d/a.png": "out_of_memory"}
    assert folder.ingest().report["kept"] == 1


@pytest.mark.parametrize("deleted", ["a.png", "c.png", "e.png"])
def test_C06_deleting_an_image_does_not_shift_other_captions(folder: Any, deleted: str) -> None:
    for name in "abcde":
        folder.add(f"{name}.png", folder.picture(ord(name)), caption=f"this is {name}")
    folder.ingest()
    (folder.root / deleted).unlink()
    for _ in range(2):  # with indexes from before and from after the deletion
        captions = dict(folder.ingest().table.select("path", "caption").rows())
        assert captions == {f"{name}.png": f"this is {name}" for name in "abcde" if f"{name}.png" != deleted}
    (folder.root / deleted).with_suffix(".txt").unlink()
    assert dict(folder.ingest().table.select("path", "caption").rows()) == captions


def test_filename_and_fixed_captions_need_no_caption_files(folder: Any) -> None:
    folder.add("a_red_car.png", caption=None)
    folder.captions = {"from": "filename"}
    assert folder.ingest().table["caption"].to_list() == ["a red car"]
    folder.captions = {"from": "fixed", "text": "sks"}
    assert folder.ingest().table["caption"].to_list() == ["sks"]


def test_the_funnel_is_logged_with_the_reasons_of_both_stages(folder: Any) -> None:
    folder.add("good.png")
    folder.add("empty.png", b"")
    folder.add("uncaptioned.png", caption=None)
    (folder.root / ".DS_Store").write_bytes(b"x")
    result = folder.ingest()
    funnel = "3 found, 3 ignored (2 captions, 1 hidden), 2 rejected (1 caption missing, 1 empty file), 1 kept"
    assert funnel in folder.log
    assert result.report["funnel"] == [
        {"what": "found", "kind": "", "number": 3},
        {"what": "ignored", "kind": "", "number": 3},
        {"what": "ignored", "kind": "captions", "number": 2},
        {"what": "ignored", "kind": "hidden", "number": 1},
        {"what": "rejected", "kind": "", "number": 2},
        {"what": "rejected", "kind": "caption_missing", "number": 1},
        {"what": "rejected", "kind": "empty_file", "number": 1},
        {"what": "kept", "kind": "", "number": 1},
    ]


@pytest.mark.parametrize("change", [{}, {"limit": 1}, {"filters": {"min_width": 8}}], ids=str)
def test_a_dataset_renamed_after_the_scan_is_an_error_with_a_fix(folder: Any, change: dict[str, Any]) -> None:
    folder.add("a.png")
    folder.scan()
    folder.dataset = {"name": "renamed", **change}
    with pytest.raises(
        DatasetError, match="has images of d, but the recipe's datasets are renamed"
    ) as raised:
        folder.validate()
    assert raised.value.fix.startswith("materialize raw_images first")
    assert folder.ingest().table["sample_id"].to_list() == ["renamed/a.png"]


def test_a_dataset_without_images_gives_empty_tables(folder: Any) -> None:
    result = folder.ingest()
    assert (len(result.table), len(result.rejected), result.report["samples"]) == (0, 0, 0)
    assert len(folder.assign().table) == 0


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_I02_randomly_damaged_images_do_not_stop_the_stage(folder: Any) -> None:
    random = np.random.default_rng(5)
    for index in range(60):
        data = bytearray(folder.picture(index, kind=("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")[index % 6]))
        for at in random.integers(0, len(data), 3):
            data[at] ^= 0xFF
        folder.add(f"{index}.png", bytes(data))
    result = folder.ingest()
    raw = folder.tables.read_rejected("raw_images")
    assert len(result.table) + len(result.rejected) + len(raw) == 60


def test_the_text_of_the_funnel_is_one_line_and_adds_up() -> None:
    rows = funnel_rows(
        1195, passed_over={"hidden": 3, "special": 10}, rejected={"truncated": 4, "caption_missing": 1}
    )
    assert funnel_text(rows) == (
        "1,200 found, 13 ignored (10 special, 3 hidden), "
        "5 rejected (4 truncated, 1 caption missing), 1,195 kept"
    )


def test_numbers_of_the_funnel_without_kinds_have_no_parentheses() -> None:
    assert funnel_text(funnel_rows(24, passed_over={}, rejected={})) == (
        "24 found, 0 ignored, 0 rejected, 24 kept"
    )


def test_I29_I30_images_whose_colours_are_unknown_are_rejected_by_name_and_once(folder: Any) -> None:
    grid = np.arange(24 * 40 * 3).reshape(24, 40, 3) % 256
    folder.add("pq.png", stored_png(grid, 8, (b"cICP", bytes([9, 16, 0, 1]))))
    folder.add("log.png", stored_png(grid, 8, (b"cICP", bytes([1, 9, 0, 1]))))
    folder.add("scene.tif", grey_tiff(np.linspace(0, 4, 960, dtype=np.float32).reshape(24, 40)))
    folder.add("a.png")
    for num_decoded in (4, 0):
        result = folder.ingest()
        assert result.report["decoded"] == num_decoded
        assert result.table["sample_id"].to_list() == ["d/a.png"]
        assert dict(result.rejected.select("sample_id", "reason").rows()) == {
            "d/log.png": "colour_unknown",
            "d/pq.png": "hdr_colour",
            "d/scene.tif": "range_unknown",
        }


def test_only_tables_of_images_with_decoding_rules_have_the_column(folder: Any) -> None:
    folder.add("a.png")
    assert "decoding" not in folder.ingest().table.columns
    levels = np.linspace(0, 65_535, 960).reshape(24, 40).astype(np.uint16)
    folder.add("b.tif", grey_tiff(levels, white_is_zero=True))
    assert dict(folder.ingest().table.select("sample_id", "decoding").rows()) == {
        "d/a.png": None,
        "d/b.tif": "white_is_zero",
    }
    (folder.root / "b.tif").unlink()
    assert "decoding" not in folder.ingest().table.columns
