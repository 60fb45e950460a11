"""Caption files at the limits of size and encoding, the suggested suffixes, and the requests for files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.images.formats import ImageError
from pipeline.recipe import CaptionSettings
from pipeline.storage.source import LocalSource
from pipeline.validated_dataset.caption_files import read_caption_file
from pipeline.validated_dataset.captions import Caption, caption_of, differing_files


def settings(**values: object) -> CaptionSettings:
    return CaptionSettings.model_validate(values)


def read(root: Path, data: bytes) -> str:
    (root / "a.txt").write_bytes(data)
    (text,) = caption_of(settings(), LocalSource(root), "a.png").texts
    return text


def error(root: Path, path: str = "a.png", **values: object) -> ImageError:
    with pytest.raises(ImageError) as excinfo:
        caption_of(settings(**values), LocalSource(root), path)
    return excinfo.value


def test_a_caption_of_the_maximum_size_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, b"x" * 1_000_000) == "x" * 1_000_000
    (tmp_path / "a.txt").write_bytes(b"x" * 1_000_001)
    assert error(tmp_path).detail == "its caption a.txt has more than 1,000,000 bytes"


def test_a_caption_that_the_system_does_not_open_is_unreadable(tmp_path: Path) -> None:
    caption = error(tmp_path, "x" * 300 + ".png")
    assert caption.reason == "caption_unreadable"
    assert "File name too long" in caption.detail


@pytest.mark.parametrize(
    "text",
    [
        "\u00e9",
        "\u00e9\u00e9\u732b\u732b",
        "\u00e9\u00e9\u00e9\u00e9\u0100",
        "a rose\u00e9\u00e9, \u732b\u732b\u732b",
    ],
    ids=["one character", "half Western", "a low byte of zero", "mixed"],
)
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_text_is_utf16_if_at_least_half_of_it_is_western(tmp_path: Path, text: str, encoding: str) -> None:
    assert read(tmp_path, text.encode(encoding)) == text


@pytest.mark.parametrize(
    "data",
    [
        "\u00e9\u00e9\u732b\u732b\u732b".encode("utf-16-le"),
        "\u00e9\u00e9\u00e9\u0100".encode("utf-16-le"),
        "\u00e9\u0100".encode("utf-16-be"),
    ],
    ids=["less than half Western", "many low bytes of zero", "as many low as high bytes"],
)
def test_other_data_with_zero_bytes_are_not_utf16(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    caption = error(tmp_path)
    assert caption.reason == "caption_undecodable"
    assert "is not utf-8" in caption.detail


def test_an_odd_number_of_bytes_is_not_utf16(tmp_path: Path) -> None:
    assert read(tmp_path, b"a\0b\0c") == "abc"
    assert read(tmp_path, b"a\0b\0c\0d") == "abcd"


def test_the_line_of_an_undecodable_byte_is_counted_from_the_first_byte(tmp_path: Path) -> None:
    for data, line in ((b"\xff", 1), (b"\n\xff", 2), (b"a\n\n\xff\n", 3)):
        (tmp_path / "a.txt").write_bytes(data)
        assert f"0xff in line {line}, is not utf-8" in error(tmp_path).detail


@pytest.mark.parametrize(
    ("suffixes", "suggested"),
    [
        ([".aaa", ".caption"], ".caption"),
        ([".json", ".cap", ".captions", ".caption"], ".caption"),
        ([".json", ".cap", ".captions"], ".captions"),
        ([".json", ".cap", ".aaa"], ".cap"),
        ([".json", ".aaa"], ".json"),
        ([".md", ".aaa"], ".aaa"),
        ([".b.caption", ".caption"], ".caption"),
        ([".aaa.bbb", ".md"], ".md"),
        ([".b.caption", ".md"], ".b.caption"),
        ([".CAPTION", ".md"], ".CAPTION"),
    ],
)
def test_the_most_usual_suffix_is_suggested(tmp_path: Path, suffixes: list[str], suggested: str) -> None:
    """It is the one of the usual list, or else the one with the fewest dots, or else the first."""
    for suffix in suffixes:
        (tmp_path / f"a{suffix}").touch()
    assert error(tmp_path).fix == f"set captions.suffix to [.txt, {suggested}], or write a.txt"


def test_the_first_listed_suffix_is_the_file_to_write(tmp_path: Path) -> None:
    missing = error(tmp_path, "sub/a.png", suffix=[".md", ".caption"])
    assert missing.fix == "write sub/a.md, or set captions.suffix or captions.fallback"
    assert missing.detail == "there is no sub/a.md or sub/a.caption; no other file has its name"


def test_a_caption_without_the_key_lists_up_to_ten_keys(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{" + ", ".join(f'"k{n}": 1' for n in range(12)) + "}")
    keys = ", ".join(f"'k{n}'" for n in range(10))
    assert error(tmp_path, suffix=".json").detail.endswith(f"has no key 'caption'; its keys are {keys}")
    (tmp_path / "a.json").write_text("{}")
    assert error(tmp_path, suffix=".json").detail.endswith("; its keys are (none)")


def test_the_fix_of_an_empty_caption_names_the_fallback_where_it_applies(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    write = "write a caption, or remove the image"
    assert error(tmp_path).fix == f"{write}, or set captions.fallback"
    assert error(tmp_path, **{"from": "column"}).fix == f"{write}, or set captions.fallback"
    assert error(tmp_path, "_.png", **{"from": "filename"}).fix == write


class RemoteLikeSource(LocalSource):
    """A folder that is read like a remote dataset, where each opened file is a request."""

    threads = 4

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: list[tuple[str, int]] = []

    def open_text(self, path: str, num_bytes: int = 0) -> Any:
        self.opened.append((path, num_bytes))
        return super().open_text(path, num_bytes)


def test_files_are_opened_with_their_listed_size_or_with_zero_for_an_unknown_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat")
    (tmp_path / "a.md").write_text("a dog")
    source, values = RemoteLikeSource(tmp_path), settings(suffix=[".txt", ".md"])
    for sizes in ((5, 6), ()):
        source.opened.clear()
        caption = caption_of(values, source, "a.png", sidecar_bytes=sizes)
        assert caption == Caption(("a cat",), "sidecar:a.txt")
        assert differing_files(values, source, "a.png", caption, sizes) == ["a.md"]
        assert source.opened == [*zip(("a.txt", "a.md"), sizes or (0, 0), strict=True)]

    source.opened.clear()
    assert read_caption_file(values, source, path="a.png", suffix=".txt") == ["a cat"]
    assert source.opened == [("a.txt", 0)]
