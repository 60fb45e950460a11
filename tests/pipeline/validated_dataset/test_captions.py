"""Captions come from their source in any encoding, end up in one canonical form, and ignore the locale."""

from __future__ import annotations

import codecs
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.images.formats import ImageError
from pipeline.raw_images.folder import sidecar_path
from pipeline.recipe import CaptionSettings
from pipeline.storage.source import LocalSource
from pipeline.validated_dataset.captions import Caption, canonical, caption_of, differing_files


def settings(**values: object) -> CaptionSettings:
    return CaptionSettings.model_validate(values)


def rejected(root: Path, data: bytes | None, **values: object) -> ImageError:
    if data is not None:
        (root / "a.txt").write_bytes(data)
    with pytest.raises(ImageError) as excinfo:
        caption_of(settings(**values), LocalSource(root), "a.png")
    assert excinfo.value.fix
    return excinfo.value


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
def test_C02_byte_order_marks_and_utf16_are_recognised(tmp_path: Path, data: bytes) -> None:
    assert read(tmp_path, data) == TEXT


def test_C01_an_undecodable_byte_is_reported_with_file_line_and_position(tmp_path: Path) -> None:
    error = rejected(tmp_path, b"first line\nna\xefve")
    assert error.reason == "caption_undecodable"
    assert "byte 13 of its caption, 0xef in line 2" in error.detail
    assert str(tmp_path / "a.txt") in error.detail
    assert "fallback_encoding" in error.fix


def test_C01_a_fallback_encoding_is_used_only_if_utf8_fails(tmp_path: Path) -> None:
    assert read(tmp_path, b"na\xefve", fallback_encoding="cp1252") == "na\u00efve"
    assert read(tmp_path, "na\u00efve".encode(), fallback_encoding="cp1252") == "na\u00efve"
    assert read(tmp_path, b"na\xefve", encoding="cp1252") == "na\u00efve"
    assert rejected(tmp_path, b"\x81", fallback_encoding="cp1252").reason == "caption_undecodable"


def test_C03_a_missing_caption_lists_the_suffixes_next_to_the_image(tmp_path: Path) -> None:
    error = rejected(tmp_path, None)
    assert (error.reason, "no other file" in error.detail) == ("caption_missing", True)
    for name in ("a.png", "a.jpg", "a.caption", "ab.txt", "a.TXT"):
        (tmp_path / name).touch()
    error = rejected(tmp_path, None)
    assert "next to the image: .TXT, .caption" in error.detail
    assert error.fix == "set captions.suffix to [.txt, .TXT], or write a.txt"


def test_C03_caches_of_other_trainers_are_not_suggested_as_captions(tmp_path: Path) -> None:
    (tmp_path / "a.npz").touch()
    assert "captions.suffix to" not in rejected(tmp_path, None).fix
    (tmp_path / "a.caption").touch()
    assert "captions.suffix to [.txt, .caption]" in rejected(tmp_path, None).fix
    error = rejected(tmp_path, None, suffix=[".txt", ".md"])
    assert error.detail.startswith("there is no a.txt or a.md; ")
    assert "captions.suffix to [.txt, .md, .caption]" in error.fix


LISTED = {"suffix": [".txt", ".caption", ".json"]}


def from_files(root: Path, **contents: str) -> Caption:
    for suffix, content in contents.items():
        (root / f"a.{suffix}").write_text(content, encoding="utf-8")
    return caption_of(settings(**LISTED), LocalSource(root), "a.png")


def test_the_first_listed_file_with_a_text_is_the_caption(tmp_path: Path) -> None:
    assert from_files(tmp_path, json='{"caption": "third"}') == (("third",), "sidecar:a.json")
    assert from_files(tmp_path, caption="second") == (("second",), "sidecar:a.caption")
    assert from_files(tmp_path, txt=" \n") == (("second",), "sidecar:a.caption")
    assert from_files(tmp_path, txt="first") == (("first",), "sidecar:a.txt")


def test_C04_several_files_without_text_are_one_empty_caption(tmp_path: Path) -> None:
    (tmp_path / "a.caption").write_text(" ")
    assert rejected(tmp_path, b"", **LISTED).reason == "caption_empty"


def test_C01_an_undecodable_file_is_reported_although_a_later_one_is_readable(tmp_path: Path) -> None:
    (tmp_path / "a.caption").write_text("words")
    assert rejected(tmp_path, b"na\xefve", **LISTED).reason == "caption_undecodable"


def test_only_files_with_another_text_differ(tmp_path: Path) -> None:
    def differing(**contents: str) -> list[str]:
        caption = from_files(tmp_path, **contents)
        return differing_files(settings(**LISTED), LocalSource(tmp_path), "a.png", caption)

    assert differing(txt="a cat") == []
    assert differing(caption="a  cat\r\n", json='{"caption": ""}') == []
    assert differing(json='{"caption": ["a cat", "a dog"]}') == ["a.json"]
    assert differing(caption="a dog", json="no JSON") == ["a.caption", "a.json"]
    assert differing(txt="") == ["a.json"]


@pytest.mark.parametrize(("fallback", "text"), [("a photo", "a photo"), ("filename", "a red car")])
def test_C03_a_missing_or_empty_caption_is_replaced_by_the_fallback(
    tmp_path: Path, fallback: str, text: str
) -> None:
    with_fallback = settings(fallback=fallback)
    source, path = LocalSource(tmp_path), "a_red_car.png"
    assert caption_of(with_fallback, source, path) == ((text,), "fallback")
    (tmp_path / "a_red_car.txt").write_text(" \n")
    assert caption_of(with_fallback, source, path) == ((text,), "fallback")
    (tmp_path / "a_red_car.txt").write_bytes(b"na\xefve")
    with pytest.raises(ImageError, match="caption_undecodable"):
        caption_of(with_fallback, source, path)
    column = settings(**{"from": "column"}, fallback=fallback)
    assert caption_of(column, source, path, ["", " "]) == ((text,), "fallback")
    assert caption_of(column, source, path, ["own"]) == (("own",), "column")


@pytest.mark.parametrize("data", [b"", b" \r\n\t ", codecs.BOM_UTF8, b"\0\0\0", "\u3000\u200a\n".encode()])
def test_C04_captions_without_text_are_empty(tmp_path: Path, data: bytes) -> None:
    assert rejected(tmp_path, data).reason == "caption_empty"


def test_large_and_unreadable_captions_are_rejected(tmp_path: Path) -> None:
    assert rejected(tmp_path, b"x" * 1_000_001).reason == "caption_unreadable"
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.txt").mkdir()
    assert rejected(tmp_path, None).reason == "caption_unreadable"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\r\nb\rc\nd", "a\nb\nc\nd"),
        ("  a \t b  \n\n\n c ", "a b\nc"),
        ("a\0b\x07c\ufeffd", "abcd"),
        ("cafe\u0301", "caf\u00e9"),
        ("a\u2028b\u2029c\x0bd", "a\nb\nc\nd"),
        ("a\u00a0b", "a b"),
        ("\ufb01ne m\u00b2 \u2460 \uff21", "\ufb01ne m\u00b2 \u2460 \uff21"),
    ],
    ids=["line ends", "spaces", "controls", "composed", "separators", "no-break space", "not NFKC"],
)
def test_C07_a_caption_has_one_canonical_form(text: str, wanted: str) -> None:
    assert canonical(text) == wanted


@given(st.text())
def test_C07_canonical_is_idempotent_and_free_of_control_characters(text: str) -> None:
    once = canonical(text)
    assert canonical(once) == once
    assert once == once.strip()
    assert [letter for letter in once if ord(letter) < 32 and letter != "\n"] == []


def test_captions_may_come_from_the_filename_or_be_fixed(tmp_path: Path) -> None:
    caption = caption_of(settings(**{"from": "filename"}), LocalSource(tmp_path), "sub/a_red__car.v2.png")
    assert caption == (("a red car.v2",), "filename")
    assert caption_of(settings(**{"from": "fixed", "text": " a  cat "}), LocalSource(tmp_path), "x.png") == (
        ("a cat",),
        "fixed",
    )


def test_the_caption_suffix_can_be_set(tmp_path: Path) -> None:
    (tmp_path / "a.caption").write_text("words")
    assert caption_of(settings(suffix=".caption"), LocalSource(tmp_path), "a.png") == (
        ("words",),
        "sidecar:a.caption",
    )


def test_C07_each_line_can_be_a_separate_caption(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\n  two \n\n")
    assert caption_of(settings(), LocalSource(tmp_path), "a.png").texts == ("one\ntwo",)
    assert caption_of(settings(lines="each"), LocalSource(tmp_path), "a.png").texts == ("one", "two")


def test_a_manifests_captions_are_canonical_and_empty_ones_are_skipped(tmp_path: Path) -> None:
    column = settings(**{"from": "column"})
    texts = ("  a   cat ", "", "a dog")
    assert caption_of(column, LocalSource(tmp_path), "a.png", texts) == (("a cat", "a dog"), "column")
    for no_text in ((), None, (" ", "\0")):
        with pytest.raises(ImageError) as excinfo:
            caption_of(column, LocalSource(tmp_path), "a.png", no_text)
        assert excinfo.value.reason == "caption_empty"


def json_captions(root: Path, data: str, **values: object) -> tuple[str, ...]:
    (root / "a.json").write_text(data, encoding="utf-8")
    return caption_of(settings(suffix=".json", **values), LocalSource(root), "a.png").texts


def test_a_json_files_caption_is_the_value_of_its_key(tmp_path: Path) -> None:
    content = '{"caption": "a  red\\ncaf\\u00e9", "tags": ["red", "", "wet"], "width": 3}'
    assert json_captions(tmp_path, content) == ("a red\ncaf\u00e9",)
    assert json_captions(tmp_path, "\ufeff" + content, json_key="tags") == ("red", "wet")


@pytest.mark.parametrize(
    ("data", "reason", "what"),
    [
        ("a plain text", "caption_undecodable", "is not valid JSON"),
        ('["a", "b"]', "caption_missing", "must hold a JSON object"),
        ('{"text": "a", "tags": []}', "caption_missing", "its keys are 'text', 'tags'"),
        ('{"caption": {"en": "a"}}', "caption_undecodable", "must be a text or a list of texts"),
        ('{"caption": ["a", 3]}', "caption_undecodable", "must be a text or a list of texts"),
        ('{"caption": null}', "caption_undecodable", "must be a text or a list of texts"),
        ('{"caption": " "}', "caption_empty", "is empty"),
        (
            '{"caption": "a smile \\ud83d"}',
            "caption_undecodable",
            "contains \\ud83d, half of a surrogate pair",
        ),
        ('{"caption": ["a", "\\ude00\\ud83d"]}', "caption_undecodable", "contains \\ude00"),
        pytest.param("[" * 200_000, "caption_undecodable", "is not valid JSON", id="deep"),
    ],
)
def test_a_json_file_without_a_caption_is_rejected(tmp_path: Path, data: str, reason: str, what: str) -> None:
    with pytest.raises(ImageError) as excinfo:
        json_captions(tmp_path, data)
    assert excinfo.value.reason == reason
    assert what in excinfo.value.detail
    assert excinfo.value.fix


def test_C07_a_lone_surrogate_is_rejected_and_a_surrogate_pair_accepted(
    tmp_path: Path,
) -> None:
    assert rejected(tmp_path, b"+2D0-", encoding="utf-7").reason == "caption_undecodable"
    assert json_captions(tmp_path, '{"caption": "\\ud83d\\ude00"}') == ("\U0001f600",)


def test_C03_a_metadata_file_in_the_folder_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "metadata.jsonl").write_text("{}", encoding="utf-8")
    assert "set datasets[].path to metadata.jsonl" in rejected(tmp_path, None).fix


def test_C03_a_folder_is_listed_once_even_if_many_captions_are_missing(tmp_path: Path) -> None:
    class Counted(LocalSource):
        listed = 0

        def sibling_names(self, path: str) -> list[str]:
            self.listed += 1
            return super().sibling_names(path)

    (tmp_path / "sub").mkdir()
    for name in ("a.b.caption", "a.json", "sub/a.b.md", ".a.b.hidden"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    source = Counted(tmp_path)
    others: list[str] = []
    for path in ("a.b.png", "a.png", "c.png", "sub/a.b.png", "a.b.jpg"):
        with pytest.raises(ImageError) as excinfo:
            caption_of(settings(), source, path)
        others.append(excinfo.value.detail.partition("; ")[2])
    assert others == [
        "next to the image: .caption",
        "next to the image: .b.caption, .json",
        "no other file has its name",
        "next to the image: .md",
        "next to the image: .caption",
    ]
    assert source.listed == 2


INGEST_SCRIPT = """
import sys, warnings
from pipeline.recipe import Recipe
from pipeline.raw_images.stage import scan
from pipeline.validated_dataset.stage import validate
from pipeline.reporting.reports import write_report
from pipeline.storage.tables import Tables
warnings.filterwarnings("error", category=EncodingWarning, module=r"pipeline\\.")
recipe = Recipe.model_validate_json(sys.stdin.buffer.read())
tables = Tables(recipe.output_dir)
raw = scan(recipe, tables, log=str)
write_report(recipe.output_dir, "raw_images", raw.report)
valid = validate(recipe, raw.table, tables, log=str)
tables.write("validated_dataset", valid.table)
tables.write_rejected("validated_dataset", valid.rejected)
"""
"""A script that fails if a text file is opened in the locale's encoding."""


@pytest.mark.parametrize("utf8", ["0", None], ids=["ASCII by default", "Python's choice"])
def test_C08_captions_are_the_same_under_another_locale(folder: Any, utf8: str | None) -> None:
    name = "\u00fcber" if utf8 is None else "uber"  # without UTF-8, such a name cannot be decoded
    folder.add(f"{name}.png", folder.picture(1), caption="caf\u00e9 \u2013 \u732b")
    folder.add("bom.png", folder.picture(2), caption="\ufeffna\u00efve".encode())
    folder.add("windows.png", folder.picture(3), caption=b"na\xefve")
    expected = folder.ingest()
    (folder.output_dir / "tables").rename(folder.output_dir / "expected")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "PYTHONUTF8"))}
    variables |= {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"} | ({} if utf8 is None else {"PYTHONUTF8": utf8})
    subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-c", INGEST_SCRIPT],
        input=folder.recipe.model_dump_json().encode(),
        env=variables,
        cwd=Path(__file__).parents[3],
        check=True,
        timeout=120,
    )
    assert folder.tables.read("validated_dataset").equals(expected.table)
    reasons = folder.tables.read_rejected("validated_dataset").select("path", "reason", "detail")
    assert reasons.equals(expected.rejected.select("path", "reason", "detail"))
    assert reasons["reason"].to_list() == ["caption_undecodable"]


class RemoteLikeSource(LocalSource):
    """A folder that is read like a remote dataset, where each opened file is a request."""

    threads = 4

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: list[str] = []

    def open_text(self, path: str, num_bytes: int) -> Any:
        self.opened.append(path)
        return super().open_text(path, num_bytes)


def test_no_request_is_made_for_caption_files_that_the_listing_does_not_contain(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat")
    source, values = RemoteLikeSource(tmp_path), settings(suffix=[".caption", ".txt", ".json"])
    sidecar_bytes = (-1, 5, -1)
    caption = caption_of(values, source, "a.png", sidecar_bytes=sidecar_bytes)
    assert caption == Caption(("a cat",), "sidecar:a.txt")
    assert differing_files(values, source, "a.png", caption, sidecar_bytes) == []
    assert source.opened == ["a.txt"]
