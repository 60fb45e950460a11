"""Captions: sources, encodings, and one canonical form."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.images.formats import ImageError
from pipeline.recipe import CaptionSettings
from pipeline.storage.source import LocalSource
from pipeline.validated_dataset.captions import canonical, caption_of, sidecar_path


def settings(**values: object) -> CaptionSettings:
    return CaptionSettings.model_validate(values)


def refused(root: Path, data: bytes | None, **values: object) -> ImageError:
    if data is not None:
        (root / "a.txt").write_bytes(data)
    with pytest.raises(ImageError) as caught:
        caption_of(settings(**values), LocalSource(root), "a.png")
    assert caught.value.fix
    return caught.value


def read(root: Path, data: bytes, **values: object) -> str:
    (root / "a.txt").write_bytes(data)
    caption = caption_of(settings(**values), LocalSource(root), "a.png")
    assert caption.source == "sidecar:a.txt"
    (text,) = caption.texts
    return text


@pytest.mark.parametrize(
    ("path", "sidecar"),
    [
        ("a.png", "a.txt"),
        ("a.b.png", "a.b.txt"),
        ("s.x/a", "s.x/a.txt"),
        ("s/x..jpg", "s/x..txt"),
        ("a.", "a.txt"),
    ],
)
def test_I16_only_the_last_suffix_is_replaced(path: str, sidecar: str) -> None:
    assert sidecar_path(path, ".txt") == sidecar


TEXT = "ein Caf\u00e9, \u732b \U0001f600"


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        codecs.BOM_UTF8 + TEXT.encode(),
        TEXT.encode("utf-16"),
        codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
        codecs.BOM_UTF32_LE + TEXT.encode("utf-32-le"),
        TEXT.encode("utf-16-le"),
        TEXT.encode("utf-16-be"),
    ],
)
def test_C02_byte_order_marks_and_utf16_are_understood(tmp_path: Path, data: bytes) -> None:
    assert read(tmp_path, data) == TEXT


def test_C01_a_windows_byte_is_named_by_file_line_and_byte(tmp_path: Path) -> None:
    error = refused(tmp_path, b"first line\nna\xefve")
    assert error.reason == "caption_undecodable"
    assert "byte 13 of its caption, 0xef in line 2" in error.detail
    assert str(tmp_path / "a.txt") in error.detail
    assert "fallback_encoding" in error.fix


def test_C01_a_fallback_encoding_repairs_it_and_utf8_still_wins(tmp_path: Path) -> None:
    assert read(tmp_path, b"na\xefve", fallback_encoding="cp1252") == "na\u00efve"
    assert read(tmp_path, "na\u00efve".encode(), fallback_encoding="cp1252") == "na\u00efve"
    assert read(tmp_path, b"na\xefve", encoding="cp1252") == "na\u00efve"
    assert refused(tmp_path, b"\x81", fallback_encoding="cp1252").reason == "caption_undecodable"


def test_C03_a_missing_caption_says_what_lies_beside_the_image(tmp_path: Path) -> None:
    error = refused(tmp_path, None)
    assert (error.reason, "nothing else" in error.detail) == ("caption_missing", True)
    for name in ("a.png", "a.jpg", "a.caption", "ab.txt", "a.TXT"):
        (tmp_path / name).touch()
    error = refused(tmp_path, None)
    assert "beside it lie .TXT, .caption" in error.detail
    assert "captions.suffix to .TXT" in error.fix


@pytest.mark.parametrize("data", [b"", b" \r\n\t ", codecs.BOM_UTF8, b"\0\0\0", "\u3000\u200a\n".encode()])
def test_C04_captions_without_text_are_empty(tmp_path: Path, data: bytes) -> None:
    assert refused(tmp_path, data).reason == "caption_empty"


def test_captions_that_cannot_be_read(tmp_path: Path) -> None:
    assert refused(tmp_path, b"x" * 1_000_001).reason == "caption_unreadable"
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.txt").mkdir()
    assert refused(tmp_path, None).reason == "caption_unreadable"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\r\nb\rc\nd", "a\nb\nc\nd"),
        ("  a \t b  \n\n\n c ", "a b\nc"),
        ("a\0b\x07c\ufeffd", "abcd"),
        ("cafe\u0301", "caf\u00e9"),
        ("a\u2028b\u2029c\x0bd", "a\nb\nc\nd"),
        ("a\u00a0b", "a b"),
    ],
)
def test_C07_the_canonical_form(text: str, wanted: str) -> None:
    assert canonical(text) == wanted


@given(st.text())
def test_C07_canonical_is_idempotent_and_free_of_control_characters(text: str) -> None:
    once = canonical(text)
    assert canonical(once) == once
    assert once == once.strip()
    assert not any(ord(letter) < 32 and letter != "\n" for letter in once)


def test_filename_and_fixed_captions(tmp_path: Path) -> None:
    caption = caption_of(settings(**{"from": "filename"}), LocalSource(tmp_path), "sub/a_red__car.v2.png")
    assert caption == (("a red car.v2",), "filename")
    assert caption_of(settings(**{"from": "fixed", "text": " a  cat "}), LocalSource(tmp_path), "x.png") == (
        ("a cat",),
        "fixed",
    )


def test_another_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.caption").write_text("words")
    assert caption_of(settings(suffix=".caption"), LocalSource(tmp_path), "a.png") == (
        ("words",),
        "sidecar:a.caption",
    )


def test_C07_each_line_may_be_a_caption_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\n  two \n\n")
    assert caption_of(settings(), LocalSource(tmp_path), "a.png").texts == ("one\ntwo",)
    assert caption_of(settings(lines="each"), LocalSource(tmp_path), "a.png").texts == ("one", "two")


def test_captions_of_a_listing_are_canonical_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    column = settings(**{"from": "column"})
    listed = ("  a   cat ", "", "a dog")
    assert caption_of(column, LocalSource(tmp_path), "a.png", listed) == (("a cat", "a dog"), "column")
    for nothing in ((), None, (" ", "\0")):
        with pytest.raises(ImageError) as caught:
            caption_of(column, LocalSource(tmp_path), "a.png", nothing)
        assert caught.value.reason == "caption_empty"


def json_captions(root: Path, data: str, **values: object) -> tuple[str, ...]:
    (root / "a.json").write_text(data, encoding="utf-8")
    return caption_of(settings(suffix=".json", **values), LocalSource(root), "a.png").texts


def test_of_a_json_file_the_caption_is_what_its_key_holds(tmp_path: Path) -> None:
    said = '{"caption": "a  red\\ncaf\\u00e9", "tags": ["red", "", "wet"], "width": 3}'
    assert json_captions(tmp_path, said) == ("a red\ncaf\u00e9",)
    assert json_captions(tmp_path, "\ufeff" + said, json_key="tags") == ("red", "wet")


@pytest.mark.parametrize(
    ("data", "reason", "what"),
    [
        ("a plain text", "caption_undecodable", "is no JSON"),
        ('["a", "b"]', "caption_missing", "it has no object"),
        ('{"text": "a", "tags": []}', "caption_missing", "it has 'text', 'tags'"),
        ('{"caption": {"en": "a"}}', "caption_undecodable", "neither a text nor a list of texts"),
        ('{"caption": ["a", 3]}', "caption_undecodable", "neither a text nor a list of texts"),
        ('{"caption": null}', "caption_undecodable", "neither a text nor a list of texts"),
        ('{"caption": " "}', "caption_empty", "holds no text"),
        ('{"caption": "a smile \\ud83d"}', "caption_undecodable", "has \\ud83d, which is half a character"),
        ('{"caption": ["a", "\\ude00\\ud83d"]}', "caption_undecodable", "has \\ude00"),
        pytest.param("[" * 200_000, "caption_undecodable", "is no JSON", id="deep"),
    ],
)
def test_a_json_file_without_a_caption_is_refused_and_never_the_caption_itself(
    tmp_path: Path, data: str, reason: str, what: str
) -> None:
    with pytest.raises(ImageError) as caught:
        json_captions(tmp_path, data)
    assert caught.value.reason == reason
    assert what in caught.value.detail
    assert caught.value.fix


def test_C07_half_a_character_of_any_encoding_is_refused_and_a_whole_one_in_two_escapes_taken(
    tmp_path: Path,
) -> None:
    assert refused(tmp_path, b"+2D0-", encoding="utf-7").reason == "caption_undecodable"
    assert json_captions(tmp_path, '{"caption": "\\ud83d\\ude00"}') == ("\U0001f600",)


def test_C03_a_list_of_captions_in_the_folder_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "metadata.jsonl").write_text("{}", encoding="utf-8")
    assert "let datasets[].path name metadata.jsonl" in refused(tmp_path, None).fix


def test_C03_a_folder_is_listed_once_however_many_captions_are_missing(tmp_path: Path) -> None:
    class Counted(LocalSource):
        listed = 0

        def sibling_names(self, path: str) -> list[str]:
            self.listed += 1
            return super().sibling_names(path)

    (tmp_path / "sub").mkdir()
    for name in ("a.b.caption", "a.json", "sub/a.b.md", ".a.b.hidden"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    source = Counted(tmp_path)
    told: list[str] = []
    for path in ("a.b.png", "a.png", "c.png", "sub/a.b.png", "a.b.jpg"):
        with pytest.raises(ImageError) as caught:
            caption_of(settings(), source, path)
        told.append(caught.value.detail.partition("; ")[2])
    beside = ["beside it lie .caption", "beside it lie .b.caption, .json", "nothing else has its name"]
    assert told == [*beside, "beside it lie .md", "beside it lie .caption"]
    assert source.listed == 2
