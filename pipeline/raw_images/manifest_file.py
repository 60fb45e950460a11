"""The file of a listing as a table; and where it cannot be one, which line is wrong, and what to write."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import DatasetError
from pipeline.images.formats import SUFFIXES
from pipeline.storage.addresses import Address, Url
from pipeline.storage.source import source_at

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings


def read_listing(settings: DatasetSettings) -> pl.DataFrame:
    """The listing as a table, its column of paths as text, and captions in a CSV as they are written.

    Raises:
        DatasetError: It cannot be read, or a column that the recipe names is not in it.
    """
    path = settings.path
    try:
        table = _table(settings)
    except (OSError, pl.exceptions.PolarsError, UnicodeDecodeError) as err:
        what, fix = _unreadable(settings, err)
        raise DatasetError(f"the listing cannot be read: {what}", where=str(path), fix=fix) from err
    _require_columns(settings, table)
    paths = table[settings.path_column]
    if isinstance(paths.dtype, (pl.List, pl.Array, pl.Struct, pl.Binary)):
        what = f"the column {settings.path_column!r} holds {paths.dtype} and not one path a row"
        raise DatasetError(what, where=str(path), fix="set datasets[].path_column to a column of text")
    return table.with_columns(paths.cast(pl.String))


def _table(settings: DatasetSettings) -> pl.DataFrame:
    path, kind = settings.path, settings.path.suffix.lower()
    file = io.BytesIO(_bytes(path)) if isinstance(path, Url) else path
    if kind == ".parquet":
        return pl.read_parquet(file)
    if kind == ".jsonl":
        return pl.read_ndjson(file, infer_schema_length=None)
    # A caption of digits alone stays as it is written: 007 is no 7.
    names = pl.read_csv(file, infer_schema_length=0, n_rows=0).columns
    if isinstance(file, io.BytesIO):
        file.seek(0)
    texts = {settings.path_column, *settings.captions.columns} & set(names)
    overrides = dict.fromkeys(texts, pl.String)
    return pl.read_csv(file, infer_schema_length=None, schema_overrides=overrides)


def _bytes(path: Address) -> bytes:
    return source_at(path.parent).read(path.name) if isinstance(path, Url) else path.read_bytes()


def _require_columns(settings: DatasetSettings, table: pl.DataFrame) -> None:
    named: dict[str, tuple[str, ...]] = {"path_column": (settings.path_column,)}
    if settings.captions.from_ == "column":
        named["captions.columns"] = settings.captions.columns
    if settings.focus_columns is not None:
        named["focus_columns"] = settings.focus_columns
    for key, columns in named.items():
        missing = [column for column in columns if column not in table.columns]
        if missing:
            what = f"the listing has no column {missing[0]!r}; it has {', '.join(map(repr, table.columns))}"
            fix = _fix_of_columns(settings, table, key)
            raise DatasetError(what, where=str(settings.path), fix=fix)


def _fix_of_columns(settings: DatasetSettings, table: pl.DataFrame, key: str) -> str:
    columns = table.columns
    if settings.path.suffix.lower() == ".csv":
        other = next((name for name in (";", "\t", "|") if len(columns) == 1 and name in columns[0]), None)
        if other is not None:
            return (
                f"separate its columns by commas, not by {other!r}; texts that hold commas in double quotes"
            )
        if any(name.rpartition(".")[2].lower() in SUFFIXES for name in columns):
            return "write the columns' names into its first line, such as path,caption"
    holds = {"path_column": "the paths", "captions.columns": "the captions", "focus_columns": "the focus"}
    what = f"set datasets[].{key} to what holds {holds[key]}"
    if key == "path_column" and settings.captions.from_ == "column":
        what += ", and datasets[].captions.columns to what holds the captions"
    return what


def _unreadable(settings: DatasetSettings, err: Exception) -> tuple[str, str]:
    """What is wrong, with its line where that is found, and what to do."""
    kind = settings.path.suffix.lower()
    try:
        data = _bytes(settings.path)
    except OSError as unread:
        return str(unread.strerror or unread), "correct datasets[].path, or make the file readable"
    if kind != ".parquet":
        try:
            data.decode("utf-8-sig")
        except UnicodeDecodeError as undecodable:
            start = undecodable.start
            line = data.count(b"\n", 0, start) + 1
            return f"byte 0x{data[start]:02x} in line {line} is no UTF-8", "save the file as UTF-8"
    for line, what, fix in _wrong_lines(kind, data):
        return f"line {line} {what}", fix
    return str(err).partition("\n")[0], "write the file anew: Parquet, JSON lines or CSV, in UTF-8"


def _wrong_lines(kind: str, data: bytes) -> Iterator[tuple[int, str, str]]:
    """Of text in UTF-8: line, what is wrong with it, fix."""
    if kind == ".jsonl":
        for number, line in enumerate(data.splitlines(), start=1):
            said = _wrong_json(line)
            if said is not None:
                fix = 'write one JSON object a line, such as {"path": "rose.jpg", "caption": "a rose"}'
                yield number, said, fix
    if kind == ".csv":
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""))
        heading = next(reader, [])
        for row in reader:
            if len(row) > len(heading):
                what = f"has {len(row)} fields, the heading {len(heading)}"
                yield (
                    reader.line_num,
                    what,
                    'put texts that hold commas in double quotes: rose.jpg,"red, wet"',
                )


def _wrong_json(line: bytes) -> str | None:
    try:
        row: Any = json.loads(line) if line.strip() else {}
    except (ValueError, RecursionError) as err:  # the latter of [[[[...
        return f"is no JSON: {err}"
    return None if isinstance(row, dict) else "is no JSON object"
