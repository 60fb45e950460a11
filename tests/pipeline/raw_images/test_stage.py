"""The scan records and rejects images, rereads only changed files, and never changes the sources."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import DatasetError
from pipeline.images.decode import MAX_IMAGE_PX, hash_bytes
from pipeline.storage.atomic import OLD_S, temp_path_for, write_bytes

Settled = Callable[[], None]


def reasons(result: Any) -> dict[str, str]:
    return dict(result.rejected.select("sample_id", "reason").rows())


def test_each_image_has_its_size_hash_and_stat(folder: Any) -> None:
    path = folder.add("sub/a.png", folder.picture(1, 30, 50))
    (row,) = folder.scan().table.rows(named=True)
    assert (row["sample_id"], row["dataset"], row["path"]) == ("d/sub/a.png", "d", "sub/a.png")
    assert (row["height"], row["width"], row["channels"], row["mode"]) == (30, 50, 3, "RGB")
    assert row["content_hash"] == hash_bytes(path.read_bytes())
    assert (row["file_bytes"], row["mtime_ns"]) == (path.stat().st_size, path.stat().st_mtime_ns)
    assert (row["format"], row["orientation"], row["notes"]) == ("PNG", 1, "")


def test_files_that_are_not_images_are_rejected_with_reason_and_fix_and_the_others_kept(folder: Any) -> None:
    folder.add("good.png")
    folder.add("empty.jpg", b"")
    folder.add("words.jpg", b"these are only words")
    folder.add("page.jpg", b"<!DOCTYPE html><html></html>")
    folder.add("phone.jxl", b"\xff\x0a" + bytes(40))
    result = folder.scan()
    assert reasons(result) == {
        "d/empty.jpg": "empty_file",
        "d/words.jpg": "not_an_image",
        "d/page.jpg": "not_an_image",
        "d/phone.jxl": "plugin_missing",
    }
    assert [fix for fix in result.rejected["fix"] if len(fix) <= 5] == []
    report = result.report
    assert (report["in"], report["kept"], report["rejected"], report["samples"]) == (5, 1, 4, 1)
    assert report["rejected_by_reason"]["not_an_image"] == 2


def test_I14_the_recipes_pixel_limit_also_applies_to_unchanged_files(folder: Any, settled: Settled) -> None:
    assert folder.recipe.checks.max_image_pixels == MAX_IMAGE_PX
    folder.add("small.png", folder.picture(1, 10, 10))
    folder.add("large.png", folder.picture(2, 40, 50))
    assert folder.scan().report["kept"] == 2
    settled()
    folder.checks = {"max_image_pixels": 1999}
    lowered = folder.scan()
    assert reasons(lowered) == {"d/large.png": "too_large"}
    assert "set checks.max_image_pixels to 2000" in lowered.rejected["fix"].item()
    folder.checks = {"max_image_pixels": 2000}
    assert reasons(folder.scan()) == {}, "an image of 2,000 pixels is at the limit"


def test_a_scan_removes_temporary_files_that_killed_jobs_left_a_day_ago(folder: Any) -> None:
    folder.add("small.png", folder.picture(1, 10, 10))
    paths = [temp_path_for(folder.recipe.output_dir / name / "x") for name in ("tables/rejected", "reports")]
    for path in paths:
        write_bytes(path, b"")
        os.utime(path, (time.time() - OLD_S - 60,) * 2)
    folder.scan()
    assert [path for path in paths if path.exists()] == []


def test_unchanged_files_are_not_read_again(folder: Any, settled: Settled) -> None:
    for index in range(4):
        folder.add(f"{index}.png", folder.picture(index))
    first = folder.scan()
    assert (first.report["read"], first.report["unchanged"]) == (4, 0)
    settled()
    second = folder.scan()
    assert (second.report["read"], second.report["unchanged"]) == (0, 4)
    assert second.table.equals(first.table)


def test_a_file_changed_shortly_before_the_scan_is_read_again(folder: Any) -> None:
    """Within the clock's granularity a second change may leave the same stat, as with git's racy entries."""
    folder.add("a.png")
    folder.scan()
    assert folder.scan().report["read"] == 1


def test_an_edit_that_keeps_size_and_modification_time_is_noticed(folder: Any, settled: Settled) -> None:
    path = folder.add("a.bmp", folder.picture(1, kind="BMP"))
    before = folder.scan().table["content_hash"][0]
    settled()
    stat = path.stat()
    path.write_bytes(folder.picture(2, kind="BMP"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    result = folder.scan()
    assert result.report["read"] == 1
    assert result.table["content_hash"][0] != before


def test_a_moved_file_is_read_again_and_so_is_every_file_with_a_new_decoder(
    folder: Any, settled: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder.add("a.png")
    folder.scan()
    settled()
    path.rename(folder.root / "b.png")
    assert folder.scan().report["read"] == 1
    assert folder.scan().report["read"] == 0
    monkeypatch.setattr("pipeline.images.decode.DECODER", "another")
    assert folder.scan().report["read"] == 1


def test_I18_files_dated_far_in_the_future_are_kept_and_recognised_as_unchanged(
    folder: Any, settled: Settled
) -> None:
    """From 2262 on, nanoseconds do not fit into a to_int64 64-bit column."""
    named = {"a.png": folder.add("a.png"), "é.png": folder.add("é.png"), "sub/b": folder.add("sub/b")}
    link = folder.root / "link.png"
    link.symlink_to(folder.add("../outside.png"))
    link.with_suffix(".txt").write_text("a caption")
    date_ns = 10_500_000_000 * 10**9  # September 2302
    for path in (*named.values(), *folder.root.rglob("*.txt"), link):
        os.utime(path, ns=(date_ns, date_ns))
    if link.stat().st_mtime_ns != date_ns:
        pytest.skip("this file system cannot store such a date")
    assert folder.ingest().report["kept"] == 4
    settled()
    second = folder.scan().report
    assert (second["read"], second["unchanged"]) == (0, 4)
    assert folder.validate().report["kept"] == 4
    listing = folder.root.with_name("all.csv")
    listing.write_text("path\na.png\nsub/b\n", encoding="utf-8")
    folder.dataset = {"path": str(listing), "images": str(folder.root)}
    assert folder.scan().report["unchanged"] == 2


def test_I23_a_repaired_image_is_read_again(folder: Any, settled: Settled) -> None:
    path = folder.add("a.png", b"")
    assert len(folder.scan().rejected) == 1
    settled()
    path.write_bytes(folder.picture())
    result = folder.scan()
    assert (len(result.table), len(result.rejected)) == (1, 0)


def test_I17_of_two_names_that_differ_in_unicode_form_the_composed_one_is_kept(folder: Any) -> None:
    composed, decomposed = "caf\u00e9.png", "cafe\u0301.png"
    folder.add(composed, folder.picture(1))
    folder.add(decomposed, folder.picture(2))
    result = folder.scan()
    assert result.table["sample_id"].to_list() == [f"d/{composed}"]
    (kept_row,) = result.table.rows(named=True)
    (row,) = result.rejected.rows(named=True)
    assert row["reason"] == "name_collision"
    assert (kept_row["path"], row["path"]) == (composed, decomposed)
    assert row["sample_id"] != kept_row["sample_id"]
    assert (folder.root / kept_row["path"]).is_file()
    assert result.report["in"] == 2


def test_I17_the_sample_id_is_composed_and_the_path_stays_as_spelled(folder: Any) -> None:
    folder.add("o\u0308de/cafe\u0301.png")
    (row,) = folder.scan().table.rows(named=True)
    assert row["sample_id"] == "d/\u00f6de/caf\u00e9.png"
    assert (folder.root / row["path"]).is_file()


@pytest.mark.parametrize(
    "name", ["a b'\"c.png", "new\nline.png", "\U0001f600.png", "x" * 251 + ".png", "a.b.c.png"]
)
def test_I18_unusual_names_are_kept(folder: Any, name: str) -> None:
    folder.add(name, caption=None)
    result = folder.scan()
    assert result.table["sample_id"].to_list() == [f"d/{name}"]


def test_I18_names_that_are_not_utf8_are_rejected_with_their_bytes(folder: Any) -> None:
    names = [b"caf\xe9.png", b"caf\xe8.png", b"caf\\xe9.png"]
    for name in names:
        try:
            folder.add(os.fsdecode(name), folder.picture(), caption=None)
        except OSError:
            pytest.skip("this file system accepts only UTF-8 names")
    result = folder.scan()
    assert result.table["path"].to_list() == ["caf\\xe9.png"]
    assert result.rejected["reason"].to_list() == ["name_undecodable"] * 2
    assert "b'caf\\xe9.png'" in "".join(result.rejected["detail"])


def test_I16_underscores_dots_and_equal_stems_are_distinct_samples(folder: Any) -> None:
    for name in ("a/x.png", "b/x.png", "a.b.jpg", "a.c.jpg", "x.jpg", "x.png", "x_1_2.png"):
        folder.add(name)
    assert len(folder.scan().table) == 7


def test_C09_captions_without_an_image_are_counted_and_listed(folder: Any) -> None:
    folder.add("a.png")
    folder.add("broken.png", b"")
    (folder.root / "lonely.txt").write_text("x")
    report = folder.scan().report
    assert report["captions_without_image"] == 1
    assert report["named"]["captions_without_image"] == ["d/lonely.txt"]


def test_C09_a_caption_of_a_rejected_image_or_of_one_without_suffix_is_not_an_orphan(folder: Any) -> None:
    shutil.copy(folder.add("a.png"), folder.root / "scraped")
    (folder.root / "empty.png").touch()
    (folder.root / "gone.png").symlink_to(folder.root / "nowhere.png")
    for name in ("a", "scraped", "empty", "gone", "A", "sub"):
        (folder.root / f"{name}.txt").write_text("x")
    (folder.root / "sub").mkdir()
    shutil.copy(folder.root / "a.txt", folder.root / "sub" / "a.txt")
    report = folder.scan().report
    assert report["named"]["captions_without_image"] == ["d/A.txt", "d/sub.txt", "d/sub/a.txt"]
    assert report["passed_over"]["captions"] == 7


def test_a_missing_dataset_is_an_error(folder: Any) -> None:
    folder.root.rmdir()
    with pytest.raises(DatasetError, match=r"datasets\[\].path"):
        folder.scan()


def test_I22_the_dataset_is_not_changed_even_if_it_is_read_only(folder: Any) -> None:
    folder.add("sub/a.png")
    folder.add("b.png", b"")

    def state(root: Path) -> list[tuple[str, int, int, int]]:
        paths = [root, *sorted(root.rglob("*"))]
        stats = [(str(path), path.stat()) for path in paths]
        return [(name, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size) for name, stat in stats]

    for path in (folder.root / "sub", folder.root):
        path.chmod(0o500)
    before = state(folder.root)
    folder.scan()
    folder.validate()
    after = state(folder.root)
    for path in (folder.root, folder.root / "sub"):
        path.chmod(0o700)
    assert after == before


def test_two_datasets_may_have_files_of_the_same_name(folder: Any, tmp_path: Path) -> None:
    folder.add("a.png")
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.png").write_bytes(folder.picture(9))
    settings = [
        *folder.recipe.datasets,
        folder.recipe.datasets[0].model_copy(update={"name": "e", "path": other}),
    ]
    recipe = folder.recipe.model_copy(update={"datasets": tuple(settings)})
    from pipeline.raw_images.stage import scan

    assert scan(recipe, folder.tables, log=folder.log.append).table["sample_id"].to_list() == [
        "d/a.png",
        "e/a.png",
    ]


def test_a_file_rejected_for_its_content_is_not_read_again(folder: Any, settled: Settled) -> None:
    folder.add("good.png")
    folder.add("empty.jpg", b"")
    folder.add("words.jpg", b"these are only words")
    folder.add("cut.png", folder.picture()[:30])
    folder.add("large.png", folder.picture(2, 40, 50))
    folder.add("phone.jxl", b"\xff\x0a" + bytes(40))  # a plug-in may be installed later
    folder.checks = {"max_image_pixels": 1999}
    first = folder.scan()
    assert len(first.rejected) == 5
    settled()
    second = folder.scan()
    assert second.rejected.equals(first.rejected)
    assert (second.report["read"], second.report["rejected_unchanged"]) == (1, 4)
    folder.add("words.jpg", folder.picture(3))  # repaired
    (folder.root / "empty.jpg").rename(folder.root / "moved.jpg")
    folder.checks = {"max_image_pixels": 2000}
    repaired = folder.scan()
    assert sorted(repaired.table["path"]) == ["good.png", "large.png", "words.jpg"]
    assert reasons(repaired) == {
        "d/cut.png": "undecodable",
        "d/moved.jpg": "empty_file",
        "d/phone.jxl": "plugin_missing",
    }


def test_a_file_rejected_shortly_after_it_changed_is_read_again(folder: Any) -> None:
    folder.add("words.jpg", b"these are only words")
    folder.scan()
    report = folder.scan().report
    assert (report["read"], report["rejected_unchanged"]) == (1, 0)


def test_a_damaged_index_of_rejected_files_counts_as_missing(folder: Any, settled: Settled) -> None:
    folder.add("words.jpg", b"these are only words")
    first = folder.scan()
    settled()
    for damage in (b"PAR1 and nothing more", b""):
        (folder.output_dir / "tables" / "known" / "refused.parquet").write_bytes(damage)
        second = folder.scan()
        assert second.report["read"] == 1
        assert second.rejected.equals(first.rejected)
