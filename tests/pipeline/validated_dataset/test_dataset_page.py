"""The dataset page shows every image with caption and bucket, escapes all text, and is written once."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from PIL import Image

from pipeline.storage.tables import Tables, empty
from pipeline.validated_dataset.dataset_page import INDEX_FILE, REJECTED_FILE, write_dataset_page

EVIL = '<script>alert("x")</script> & "quoted" <img src=x onerror=alert(1)>'


class Page(HTMLParser):
    """Tags, image addresses, links and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        assert not [name for name in values if name.startswith("on")]
        self.sources += [values["src"] or ""] if "src" in values else []
        self.links += [values["href"] or ""] if "href" in values else []

    def handle_data(self, data: str) -> None:
        self.text += data


def write(folder: Any, *, with_buckets: bool = True) -> Path:
    raw, valid = folder.scan(), folder.validate()
    rejected = pl.concat([raw.rejected, valid.rejected])
    placed = folder.assign() if with_buckets else None
    return write_dataset_page(folder.recipe, valid.table, rejected, placed=placed, log=folder.log.append)


def stats(page: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in page.parent.rglob("*") if path.is_file()}


def test_every_kept_image_has_a_thumbnail_name_caption_bucket_and_repeats(folder: Any) -> None:
    folder.dataset["repeats"] = 3
    folder.add("rose.png", folder.picture(1, 24, 40), caption="a red rose")
    folder.add("deep/tulip.png", folder.picture(2, 40, 24), caption="a yellow tulip")
    index = write(folder)
    page = Page(index)
    assert "2 images kept" in page.text
    for text in ("d/rose.png", "d/deep/tulip.png", "a red rose", "a yellow tulip", "repeats 3"):
        assert text in page.text
    buckets = folder.tables.read("aspect_buckets")["bucket"]
    assert [bucket for bucket in buckets if f"bucket {bucket}" not in page.text] == [], page.text
    assert "height x width" in page.text
    assert len(page.sources) == 2
    for source in page.sources:
        with Image.open(index.parent / source) as thumbnail:
            assert max(thumbnail.size) > 150
    assert set(page.links) == {REJECTED_FILE}


def test_rejected_images_have_reason_detail_and_fix(folder: Any) -> None:
    folder.add("good.png")
    folder.add("empty.png", b"")
    folder.add("without.png", folder.picture(99), caption=None)
    index = write(folder)
    page = Page(index.parent / REJECTED_FILE)
    rejected = folder.tables.read_rejected()
    assert len(rejected) == 2
    for row in rejected.iter_rows(named=True):
        texts = [" ".join(row[name].split()) for name in ("sample_id", "reason", "detail")]
        assert [text for text in texts if text not in page.text] == [], page.text
        assert f"fix: {' '.join(row['fix'].split())}" in page.text
    assert "2 rejected" in Page(index).text
    assert len(page.sources) == 1, "an image without a caption is shown, an empty file is not"


def test_I18_markup_in_captions_and_names_is_text(folder: Any) -> None:
    folder.add("<b>&'.png", caption=EVIL)
    folder.add("<script>x.png", b"", caption=EVIL)
    index = write(folder)
    kept, rejected = Page(index), Page(index.parent / REJECTED_FILE)
    assert EVIL in kept.text
    assert "d/<b>&'.png" in kept.text
    assert "d/<script>x.png" in rejected.text
    assert not {"script"} & {*kept.tags, *rejected.tags}
    assert len(kept.sources) == 1
    assert kept.sources[0].startswith("thumbnails/")


def test_the_page_is_written_again_only_if_its_contents_change(folder: Any) -> None:
    for name in ("a.png", "b.png"):
        folder.add(name)
    index = write(folder)
    before = stats(index)
    write(folder, with_buckets=False)
    write(folder)
    assert stats(index) == before

    (folder.root / "a.txt").write_text("another caption")
    write(folder)
    after = stats(index)
    assert after[INDEX_FILE] != before[INDEX_FILE]
    assert "another caption" in Page(index).text
    thumbnails = [name for name in before if name.endswith(".jpg")]
    assert len(thumbnails) == 2
    assert all(after[name] == before[name] for name in thumbnails), "thumbnails are drawn once"

    (folder.root / "b.png").unlink()
    write(folder)
    assert len([name for name in stats(index) if name.endswith(".jpg")]) == 1


def test_a_closed_gate_leaves_a_page_without_buckets(folder: Any) -> None:
    folder.add("a.png")
    folder.add("without.png", folder.picture(99), caption=None)
    index = write(folder, with_buckets=False)
    assert "bucket" not in Page(index).text
    assert "caption_missing" in Page(index.parent / REJECTED_FILE).text
    write(folder)
    assert "bucket" in Page(index).text


def test_a_large_dataset_is_paged_and_capped_with_a_statement(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.validated_dataset.dataset_page.MAX_IMAGES", 5)
    monkeypatch.setattr("pipeline.validated_dataset.dataset_page.IMAGES_PER_PAGE", 2)
    monkeypatch.setattr("pipeline.validated_dataset.dataset_page.MAX_PER_REASON", 1)
    for number in range(7):
        folder.add(f"{number}.png")
    folder.add("empty1.png", b"")
    folder.add("empty2.png", b"")
    index = write(folder)
    names = [INDEX_FILE, "page-2.html", "page-3.html"]
    pages = [Page(index.parent / name) for name in names]
    assert [len(page.sources) for page in pages] == [2, 2, 1]
    assert "7 images kept; these pages show 5 of them" in pages[0].text
    assert set(pages[0].links) == {"page-2.html", "page-3.html", REJECTED_FILE}
    assert "2 images; the first 1 are shown" in Page(index.parent / REJECTED_FILE).text

    for number in range(4):
        (folder.root / f"{number}.png").unlink()
    write(folder)
    assert not (index.parent / "page-3.html").exists()


def test_a_long_caption_does_not_make_a_large_page(folder: Any) -> None:
    folder.add("a.png", caption="word " * 50_000)
    index = write(folder)
    assert index.stat().st_size < 10_000
    assert re.search(r"… \([0-9,]+ characters\)", Page(index).text)


def test_an_empty_dataset_has_a_page(folder: Any) -> None:
    tables = (empty("validated_dataset"), empty("rejected"))
    index = write_dataset_page(folder.recipe, *tables, log=print)
    assert "0 images kept" in Page(index).text
    assert Tables(folder.output_dir).read_rejected().is_empty()
