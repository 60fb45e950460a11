"""A manifest that cannot be used is an error that names the file, the line and a fix."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import DatasetError
from pipeline.raw_images.manifest_file import plain_csv
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.stage import validate
from tests.pipeline.dataset_folder import picture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    root.mkdir()
    (root / "a.png").write_bytes(picture(0))
    return root


def recipe(manifest: Path, **more: Any) -> Recipe:
    root = manifest.parent.parent
    dataset = {"name": "d", "path": manifest, "captions": {"from": "column"}, **more}
    paths = {"output_dir": root / "out", "cache_dir": root / "cache"}
    return recipe_from_mapping("r", {"datasets": [dataset], **paths, "model": {"base": "a/b"}})


def validated_rows(recipe: Recipe) -> pl.DataFrame:
    """Rows after the two stages that read the manifest: one its paths, the other its captions."""
    tables = Tables(recipe.output_dir)
    return validate(recipe, scan(recipe, tables, log=str).table, tables, log=str).table


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("list.csv", b"path\n\xff\xfe\n", "cannot be read"),
        ("list.jsonl", b"{not json", "cannot be read"),
        ("list.parquet", b"PAR1 broken", "cannot be read"),
        ("list.csv", b"file,caption\na.png,x\n", "no column 'path'"),
        ("list.csv", b"path,text\na.png,x\n", "no column 'caption'"),
    ],
)
def test_an_unusable_manifest_is_an_error_that_names_the_file(
    folder: Path, name: str, content: bytes, what: str
) -> None:
    manifest = folder / name
    manifest.write_bytes(content)
    with pytest.raises(DatasetError) as excinfo:
        scan(recipe(manifest), Tables(folder.parent / "out"), log=str)
    assert what in excinfo.value.what
    assert excinfo.value.where == str(manifest)
    assert excinfo.value.fix


@pytest.mark.parametrize(
    ("name", "content", "what", "fix"),
    [
        (
            "a.csv",
            b"path;caption\na.png;x\n",
            "'path;caption'",
            "separate the columns by commas instead of ';'",
        ),
        ("a.csv", b"path\tcaption\na.png\tx\n", "no column", r"instead of '\t'"),
        ("a.csv", b"a.png,a cat\nb.png,x\n", "no column 'path'", "names in the first line"),
        (
            "a.csv",
            b"path,caption\na.png,x\nb.png,a, b\n",
            "line 3 has 3 fields, but the header has 2",
            "double quotes",
        ),
        (
            "a.csv",
            b"path,caption\na.png,caf\xe9\n",
            "byte 0xe9 in line 2 is not valid UTF-8",
            "save the file as UTF-8",
        ),
        ("a.csv", b"", "cannot be read", "save the file again"),
        pytest.param(
            "a.csv",
            b'path,caption\na.png,"a cat\nb.png,x\n',
            "line 2 has a text that starts with a quote and does not end with one",
            "write each quote in it twice",
            id="unclosed quote",
        ),
        pytest.param(
            "a.csv",
            "path,caption\na.png,caf\u00e9\n".encode("utf-16") + b"\0",
            "byte 0x00 in line 3 is not valid UTF-16-LE",
            "save the file as UTF-8",
            id="odd UTF-16",
        ),
        pytest.param(
            "a.csv",
            b'path,caption\nb.png,"' + b"x" * 150_000 + b'\n"\na.png,a, b\n',
            "line 4 has 3 fields",
            "double quotes",
            id="long caption",
        ),
        pytest.param(
            "a.csv",
            b"path,caption\ra.png,x\rb.png,a, b\r",
            "line 3 has 3 fields, but the header has 2",
            "double quotes",
            id="carriage returns",
        ),
        (
            "a.jsonl",
            b'{"path": "a.png", "caption": "x"}\n{oops\n',
            "line 2 is not valid JSON",
            "one JSON object per line",
        ),
        pytest.param(
            "a.jsonl",
            b"\n" + b"[" * 200_000,
            "at most 50 deep, got more in line 2",
            "texts, numbers",
            id="deep",
        ),
        ("a.jsonl", b'[{"path": "a.png"}]\n', "line 1 is not a JSON object", "one JSON object per line"),
        (
            "a.jsonl",
            b'{"file_name": "a.png", "text": "x"}\n',
            "no column 'path'",
            "the column with the paths, and ",
        ),
        (
            "a.jsonl",
            b'{"path": ["a.png"], "caption": "x"}\n',
            "'path' must hold one path per row, got List",
            "a text column",
        ),
        (
            "a.jsonl",
            b'{"path": "a.png", "caption": {"en": "x"}}\n',
            "'caption' must hold captions, got Struct",
            "columns of text",
        ),
        (
            "a.jsonl",
            b'{"path": "a.png", "caption": "x"}\n\n{"path": "b.png", "caption": {"en": "x"}}\n',
            "'caption' must hold texts or lists of texts, but line 3 has another",
            "correct caption in that line",
        ),
        (
            "a.jsonl",
            b'{"path": "a.png", "caption": "x"}\n{"path": "b.png", "caption": ["y", ["z"]]}\n',
            "'caption' must hold texts or lists of texts, but line 2 has another",
            "correct caption in that line",
        ),
        (
            "a.jsonl",
            b'{"path": "a.png", "caption": ["\\ud800"]}\n{"path": "b.png", "caption": "x"}\n',
            "cannot be read",
            "save the file again",
        ),
    ],
)
def test_a_malformed_manifest_is_an_error_with_line_and_fix(
    folder: Path, name: str, content: bytes, what: str, fix: str
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(DatasetError) as excinfo:
        validated_rows(recipe(folder / name))
    assert what in excinfo.value.what
    assert fix in excinfo.value.fix
    assert "truncate_ragged_lines" not in str(excinfo.value)


ENCODINGS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("line_end", ["\n", "\r", "\r\n"], ids=["LF", "CR", "CRLF"])
def test_C02_manifests_in_other_encodings_and_with_other_line_ends_are_read(
    folder: Path, encoding: str, line_end: str
) -> None:
    texts = {
        "list.csv": ['"path","caption"', 'a.png,"a caf\u00e9, red"', ""],
        "list.jsonl": ['{"path": "a.png", "caption": "a caf\u00e9, red"}', ""],
    }
    for name, lines in texts.items():
        (folder / name).write_bytes(line_end.join(lines).encode(encoding))
        table = validated_rows(recipe(folder / name))
        assert table.select("path", "caption").rows() == [("a.png", "a caf\u00e9, red")]


@pytest.mark.parametrize(
    ("field", "caption"),
    [
        ('a 3" nail', 'a 3" nail'),
        ('3" by 4" and 5"', '3" by 4" and 5"'),
        ('"red" rose', "red rose"),
        ('"a ""red"" rose" in a "vase"', 'a "red" rose in a "vase"'),
        ('"he said ""hi, you"""', 'he said "hi, you"'),
        (' "spaced" ', '"spaced"'),
        ('"a\nb"', "a\nb"),
    ],
)
def test_quotes_inside_fields_are_read_as_pythons_csv_reads_them(
    folder: Path, field: str, caption: str
) -> None:
    (folder / "b.png").write_bytes(picture(1))
    content = f'path,caption,score\na.png,{field},1\nb.png,a 7" disc,2\n'
    (folder / "list.csv").write_text(content, encoding="utf-8")
    expected = {row["path"]: row["caption"].strip() for row in csv.DictReader(io.StringIO(content))}
    assert expected["a.png"] == caption
    table = validated_rows(recipe(folder / "list.csv"))
    assert dict(table.select("path", "caption").rows()) == {"a.png": caption, "b.png": 'a 7" disc'}


def as_python_reads(data: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode(), newline="")))


@given(st.text('ab",\n\r ', max_size=40))
def test_rewritten_csv_has_the_fields_that_pythons_csv_reads(text: str) -> None:
    data = text.encode()
    try:
        plain = plain_csv(data)
    except csv.Error:
        assert '"' in text
        return
    assert as_python_reads(plain) == as_python_reads(data)
    assert plain_csv(plain) == plain


@given(st.lists(st.lists(st.text('ab",\n ', max_size=5), min_size=2, max_size=3)))
def test_csv_of_pythons_writer_is_not_rewritten(rows: list[list[str]]) -> None:
    for line_end in ("\n", "\r\n"):
        file = io.StringIO(newline="")
        csv.writer(file, lineterminator=line_end).writerows(rows)
        data = file.getvalue().encode()
        assert plain_csv(data) is data


def test_a_manifest_outside_its_folder_needs_follow_links(folder: Path) -> None:
    private = folder.parent / "private.csv"
    private.write_text("path,caption\na.png,a secret\n")
    inside = folder / "real.csv"
    inside.write_text("path,caption\na.png,a rose\n")
    (folder / "inside.csv").symlink_to("real.csv")
    (folder / "outside.csv").symlink_to(private)
    (folder / "chain.csv").symlink_to("outside.csv")
    (folder.parent / "linked").symlink_to(folder)

    for manifest in (folder / "inside.csv", folder.parent / "linked" / "inside.csv"):
        assert validated_rows(recipe(manifest))["caption"].to_list() == ["a rose"]
    for name in ("outside.csv", "chain.csv"):
        with pytest.raises(DatasetError, match=r"outside the dataset's folder") as excinfo:
            validated_rows(recipe(folder / name))
        assert "follow_links: true" in str(excinfo.value.fix)
        followed = recipe(folder / name, follow_links=True)
        assert validated_rows(followed)["caption"].to_list() == ["a secret"]


NAMES = b"path,caption," + b",".join(b"c%d" % number for number in range(998))
PADDING = b'{"path": "a.png", "caption": "a rose"}\n' * 2000


@pytest.mark.parametrize(
    ("name", "content", "detail"),
    [
        ("l.jsonl", b"".join(b'{"path":"a.png","k%d":1}\n' % i for i in range(20_000)), "1,000 columns"),
        ("l.jsonl", PADDING + b"".join(b'{"k%d":1}\n' % i for i in range(2000)), "1,000 columns"),
        ("l.jsonl", b"".join(b'{"m":[{"k%d":1}]}\n' % i for i in range(2000)), "1,000 columns"),
        ("l.jsonl", b"{" + b",".join(b'"k%d":1' % i for i in range(2000)) + b"}\n", "1,000 columns"),
        ("l.jsonl", PADDING + b'{"path":"' + b"a" * 10_000_001 + b'"}\n', "line 2001 must have at most"),
        ("l.jsonl", b'{"m":' + b'{"a":' * 600 + b"1" + b"}" * 601 + b"\n", "nested at most 50"),
        ("l.jsonl", PADDING + b'{"m":' + b"[" * 1000 + b"]" * 1000 + b"}\n", "nested at most 50"),
        (
            "l.jsonl",
            b"{" + b",".join(b'"k%d":1' % i for i in range(900)) + b"}\n" + b"{}\n" * 60_000,
            "cells",
        ),
        ("l.csv", NAMES + b"," + b",".join(b"d%d" % i for i in range(400_000)) + b"\n", "1,000 columns"),
        ("l.csv", NAMES + b"\n" + b"a.png,a\n" * 60_000, "cells"),
        ("l.csv", (NAMES + b"\n" + b"a.png,a\n" * 60_000).replace(b"\n", b"\r"), "cells"),
    ],
)
def test_C14_a_manifest_that_would_use_up_memory_is_refused(
    folder: Path, name: str, content: bytes, detail: str
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(DatasetError, match=f"the manifest is not read: .*{detail}"):
        scan(recipe(folder / name), Tables(folder.parent / "out"), log=str)


def test_many_brackets_in_texts_and_usual_nesting_are_read(folder: Path) -> None:
    row = {"path": "a.png", "caption": "[{" * 100 + '\\" a rose', "boxes": [[{"x": 1}], []]}
    (folder / "list.jsonl").write_text(json.dumps(row) + "\n\n" + "{}\n" * 10)
    assert validated_rows(recipe(folder / "list.jsonl"))["caption"].to_list() == [row["caption"]]


@pytest.mark.parametrize("name", ["list.csv", "list.jsonl"])
def test_a_long_caption_of_a_manifest_is_used_and_a_huge_one_is_rejected(folder: Path, name: str) -> None:
    (folder / "b.png").write_bytes(picture(1))
    captions = {"a.png": "rose " * 40_000, "b.png": "b" * 1_000_001}
    if name == "list.csv":
        lines = ["path,caption", *(f"{path},{text}" for path, text in captions.items())]
    else:
        lines = [json.dumps({"path": path, "caption": text}) for path, text in captions.items()]
    (folder / name).write_text("\n".join(lines) + "\n")
    assert validated_rows(recipe(folder / name))["path"].to_list() == ["a.png"]
