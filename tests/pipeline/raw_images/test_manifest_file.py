"""A manifest that cannot be used is an error that names the file, the line and a fix."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from pipeline.errors import DatasetError
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


def recipe(manifest: Path) -> Recipe:
    root = manifest.parent.parent
    dataset = {"name": "d", "path": manifest, "captions": {"from": "column"}}
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
        (
            "a.jsonl",
            b'{"path": "a.png", "caption": "x"}\n{oops\n',
            "line 2 is not valid JSON",
            "one JSON object per line",
        ),
        pytest.param(
            "a.jsonl", b"[" * 200_000, "line 1 is not valid JSON", "one JSON object per line", id="deep"
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
