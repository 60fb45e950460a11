"""Read a manifest file (Parquet, JSON lines or CSV) as a table, and explain why one cannot be read."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from pipeline.errors import DatasetError
from pipeline.images.formats import SUFFIXES
from pipeline.raw_images.parquet_process import read_parquet
from pipeline.recipe.datasets import SIDE_INPUT_KEYS
from pipeline.storage.addresses import Address, Url
from pipeline.storage.regular_files import MAX_FILE_BYTES, RefusedFileError, open_regular, require_size
from pipeline.storage.remote_source import source_at

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings


class _BadLine(NamedTuple):
    number: int
    problem: str
    fix: str


def read_manifest(settings: DatasetSettings, *, max_bytes: int = MAX_FILE_BYTES) -> pl.DataFrame:
    """Return the manifest as a table. Its path column is text, and a CSV's captions stay as written.

    Raises:
        DatasetError: The manifest cannot be read, or lacks a column that the recipe names.
    """
    path = settings.path
    try:
        with _opened(path, max_bytes) as file:
            table = _read_table(settings, file)
    except RefusedFileError as err:
        raise DatasetError(f"the manifest is not read: {err.detail}", where=str(path), fix=err.fix) from err
    except (OSError, pl.exceptions.PolarsError, UnicodeError) as err:
        problem, fix = _diagnose(settings, err, max_bytes)
        raise DatasetError(f"the manifest cannot be read: {problem}", where=str(path), fix=fix) from err

    _require_columns(settings, table)
    paths = table[settings.path_column]
    if isinstance(paths.dtype, (pl.List, pl.Array, pl.Struct, pl.Binary)):
        what = f"the column {settings.path_column!r} must hold one path per row, got {paths.dtype}"
        raise DatasetError(what, where=str(path), fix="set datasets[].path_column to a text column")
    return table.with_columns(paths.cast(pl.String))


def _read_table(settings: DatasetSettings, file: io.BufferedReader | io.BytesIO) -> pl.DataFrame:
    suffix = settings.path.suffix.lower()
    if suffix == ".parquet":
        return read_parquet(file)
    if suffix == ".jsonl":
        return _read_json_lines(settings, file)

    # Text columns are not inferred: a caption of digits such as 007 must not become the number 7.
    columns = pl.read_csv(file, infer_schema_length=0, n_rows=0).columns
    file.seek(0)
    text_columns = {settings.path_column, *settings.captions.columns} & set(columns)
    side_inputs = (each.settings for each in settings.side_inputs)
    text_columns |= {each.column for each in side_inputs if each.column in columns}
    overrides = dict.fromkeys(text_columns, pl.String)
    return pl.read_csv(file, infer_schema_length=None, schema_overrides=overrides)


def _read_json_lines(settings: DatasetSettings, file: io.BufferedReader | io.BytesIO) -> pl.DataFrame:
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)
    start = file.tell()
    table = pl.read_ndjson(io.BytesIO(file.read()) if start else file, infer_schema_length=None)

    # If some rows have a text and others a list, Polars returns the lists as JSON text.
    suspected = [
        name
        for name in settings.captions.columns
        if table.schema.get(name) == pl.String and table[name].str.contains(r"^[\[{]").any()
    ]
    if not suspected:
        return table
    file.seek(start)
    return table.with_columns(_mixed_columns(settings, file, suspected))


def _mixed_columns(
    settings: DatasetSettings, lines: Iterable[bytes], columns: Sequence[str]
) -> list[pl.Series]:
    """Return the columns of JSON lines that hold lists. Each cell is a list of texts, as written."""
    texts: dict[str, list[list[str | None]]] = {name: [] for name in columns}
    mixed = set[str]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = json.loads(line)
        for name in columns:
            cell = row.get(name)
            if isinstance(cell, list):
                mixed.add(name)
            items = cell if isinstance(cell, list) else [cell]
            if any(isinstance(item, dict | list) for item in items):
                what = f"the column {name!r} must hold texts or lists of texts, but line {number} has another"
                fix = f"correct {name} in that line, or name other columns in datasets[].captions.columns"
                raise DatasetError(what, where=str(settings.path), fix=fix)
            shown = [item if item is None or isinstance(item, str) else json.dumps(item) for item in items]
            texts[name].append(shown)
    return [pl.Series(name, cells, pl.List(pl.String)) for name, cells in texts.items() if name in mixed]


def _opened(path: Address, max_bytes: int) -> io.BufferedReader | io.BytesIO:
    if not isinstance(path, Url):
        return open_regular(path, max_bytes=max_bytes)
    source = source_at(path.parent, max_file_bytes=max_bytes)
    (stat,) = source.stats([path.name]).tolist()
    require_size(stat[0], max_bytes)
    return io.BytesIO(source.read(path.name))


def _require_columns(settings: DatasetSettings, table: pl.DataFrame) -> None:
    required: dict[str, tuple[str, ...]] = {"path_column": (settings.path_column,)}
    if settings.captions.from_ == "column":
        required["captions.columns"] = settings.captions.columns
    if settings.focus_columns is not None:
        required["focus_columns"] = settings.focus_columns
    for _, key, side_input in settings.side_inputs:
        if side_input.column is not None:
            required[f"{key}.column"] = (side_input.column,)

    for key, columns in required.items():
        missing = [column for column in columns if column not in table.columns]
        if missing:
            existing = ", ".join(map(repr, table.columns))
            what = f"the manifest has no column {missing[0]!r}; its columns are {existing}"
            fix = _missing_column_fix(settings, table, key)
            raise DatasetError(what, where=str(settings.path), fix=fix)


def _missing_column_fix(settings: DatasetSettings, table: pl.DataFrame, key: str) -> str:
    columns = table.columns
    if settings.path.suffix.lower() == ".csv":
        separator = next(
            (each for each in (";", "\t", "|") if len(columns) == 1 and each in columns[0]), None
        )
        if separator is not None:
            return (
                f"separate the columns by commas instead of {separator!r}, and put texts that contain commas "
                "in double quotes"
            )
        if any(name.rpartition(".")[2].lower() in SUFFIXES for name in columns):
            return "write the column names in the first line, such as path,caption"

    contents = {"path_column": "paths", "captions.columns": "captions", "focus_columns": "focus points"}
    contents |= {
        f"{each.key}.column": f"paths of the {SIDE_INPUT_KEYS[each.kind]}" for each in settings.side_inputs
    }
    fix = f"set datasets[].{key} to the column with the {contents[key]}"
    if key == "path_column" and settings.captions.from_ == "column":
        fix += ", and datasets[].captions.columns to the column with the captions"
    return fix


def _diagnose(settings: DatasetSettings, err: Exception, max_bytes: int) -> tuple[str, str]:
    """Return why the manifest cannot be read, with the line number if possible, and how to fix it."""
    suffix = settings.path.suffix.lower()
    try:
        with _opened(settings.path, max_bytes) as file:
            data = file.read()
    except OSError as read_error:
        return str(read_error.strerror or read_error), "correct datasets[].path, or make the file readable"

    if suffix != ".parquet":
        try:
            data.decode("utf-8-sig")
        except UnicodeDecodeError as decode_error:
            start = decode_error.start
            line = data.count(b"\n", 0, start) + 1
            return f"byte 0x{data[start]:02x} in line {line} is not valid UTF-8", "save the file as UTF-8"

    bad_line = {".jsonl": _bad_json_line, ".csv": _bad_csv_line}.get(suffix, lambda _: None)(data)
    if bad_line is not None:
        return f"line {bad_line.number} {bad_line.problem}", bad_line.fix
    return str(err).partition("\n")[0], "save the file again as Parquet, JSON lines or CSV, in UTF-8"


def _bad_json_line(data: bytes) -> _BadLine | None:
    fix = 'write one JSON object per line, such as {"path": "rose.jpg", "caption": "a rose"}'
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            row: Any = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError) as err:  # RecursionError: deep nesting such as [[[[...
            return _BadLine(number, f"is not valid JSON: {err}", fix)
        if not isinstance(row, dict):
            return _BadLine(number, "is not a JSON object", fix)
    return None


def _bad_csv_line(data: bytes) -> _BadLine | None:
    reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""))
    header = next(reader, [])
    for row in reader:
        if len(row) > len(header):
            problem = f"has {len(row)} fields, but the header has {len(header)}"
            fix = 'put texts that contain commas in double quotes: rose.jpg,"red, wet"'
            return _BadLine(reader.line_num, problem, fix)
    return None
