"""Read a manifest file (Parquet, JSON lines or CSV) as a table, and explain why one cannot be read."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import polars as pl

from pipeline.errors import DatasetError
from pipeline.images.formats import SUFFIXES
from pipeline.raw_images.parquet_process import read_parquet
from pipeline.recipe.datasets import SIDE_INPUT_KEYS
from pipeline.storage.addresses import Url
from pipeline.storage.regular_files import (
    MAX_FILE_BYTES,
    InsideFolder,
    RefusedFileError,
    open_regular,
    require_size,
)
from pipeline.storage.remote_source import source_at

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings


# UTF-32 comes before UTF-16, because its little-endian mark starts with the mark of UTF-16.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
"""Byte order marks and their encodings."""

MAX_COLUMNS = 1_000
"""Maximum number of columns, and of fields inside them."""

MAX_CELLS = 50_000_000
"""Number of cells that a manifest with fewer bytes may have. A cell without a value takes no byte of the
file, but memory in a table."""

MAX_LINE_BYTES = 10_000_000
"""Maximum size of a line of JSON lines."""

MAX_DEPTH = 50
"""Maximum depth of lists and objects in JSON lines. Polars needs gigabytes of memory for 600 objects."""

# Polars compares the keys of each line with all keys before it, which takes minutes for many of both.
_CHECKED_BYTES = 64_000
"""Size of the parts of JSON lines in which keys are counted."""

_JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)
"""A text, or the start or end of a list or an object."""

_QUOTED = rb'"[^"]*(?:""[^"]*)*"(?!")'
"""A text in quotes, in which two quotes are one."""

_QUOTED_FIELD = re.compile(rb'"(?<![^,\n]")[^"]*(?:""[^"]*)*"(?=,|\r?\n|\r?\Z)')
"""A field in quotes between commas or line ends, which Polars reads as csv does."""

_FIELD_AND_END = re.compile(
    rb'(%b(?=[,\r\n]|\Z)|"[^"\r\n]*(?:""[^"\r\n]*)*"(?!")[^,\r\n]+|[^",\r\n][^,\r\n]*|)(,|\r\n?|\n|\Z)'
    % _QUOTED
)
"""A field as csv reads it, and the comma or line end behind it. The field is in quotes, in quotes with text
behind them on the line, without a quote at its start, or empty."""


class _BadLine(NamedTuple):
    number: int
    problem: str
    fix: str


def read_manifest(settings: DatasetSettings, *, max_bytes: int = MAX_FILE_BYTES) -> pl.DataFrame:
    """Return the manifest as a table. Its path column is text, and a CSV's captions stay as written.

    Raises:
        DatasetError: The manifest cannot be read, or lacks a column that the recipe names.
    """
    path, table = settings.path, read_table(settings, max_bytes=max_bytes)
    _require_columns(settings, table)
    paths = table[settings.path_column]
    if isinstance(paths.dtype, (pl.List, pl.Array, pl.Struct, pl.Binary)):
        what = f"the column {settings.path_column!r} must hold one path per row, got {paths.dtype}"
        raise DatasetError(what, where=str(path), fix="set datasets[].path_column to a text column")
    return table.with_columns(paths.cast(pl.String))


def read_table(settings: DatasetSettings, *, max_bytes: int = MAX_FILE_BYTES) -> pl.DataFrame:
    """Return the manifest as `read_manifest` does, also if it lacks columns.

    Raises:
        DatasetError: The manifest cannot be read.
    """
    path = settings.path
    try:
        with _opened(settings, max_bytes) as file:
            return _parsed(settings, file)
    except RefusedFileError as err:
        raise DatasetError(f"the manifest is not read: {err.detail}", where=str(path), fix=err.fix) from err
    except (OSError, pl.exceptions.PolarsError, UnicodeError, csv.Error) as err:
        problem, fix = _diagnose(settings, err, max_bytes)
        raise DatasetError(f"the manifest cannot be read: {problem}", where=str(path), fix=fix) from err


def _parsed(settings: DatasetSettings, file: io.BufferedReader | io.BytesIO) -> pl.DataFrame:
    suffix = settings.path.suffix.lower()
    if suffix == ".parquet":
        return read_parquet(file)
    data = _as_utf8(file.read())
    if suffix == ".jsonl":
        return _read_json_lines(settings, data)

    data = plain_csv(data)
    _require_bounded_csv(data)

    # Text columns are not inferred: a caption of digits such as 007 must not become the number 7.
    columns = pl.read_csv(data, infer_schema_length=0, n_rows=0).columns
    text_columns = {settings.path_column, *settings.captions.columns} & set(columns)
    side_inputs = (each.settings for each in settings.side_inputs)
    text_columns |= {each.column for each in side_inputs if each.column in columns}
    overrides = dict.fromkeys(text_columns, pl.String)
    return pl.read_csv(data, infer_schema_length=None, schema_overrides=overrides)


def unicode_encoding(data: bytes) -> str | None:
    """Return the encoding of a text with a byte order mark, or of UTF-16 without one; otherwise None."""
    marked = next((encoding for mark, encoding in _BYTE_ORDER_MARKS if data.startswith(mark)), None)
    if marked is not None or len(data) < 2 or len(data) % 2 or b"\0" not in data:
        return marked

    # Some Windows programs write no mark. In Western text, every second byte is zero.
    even, odd = data[0::2].count(0), data[1::2].count(0)
    if max(even, odd) * 4 < len(data) or min(even, odd) * 4 > max(even, odd):
        return None
    return "utf-16-le" if odd > even else "utf-16-be"


def _as_utf8(data: bytes) -> bytes:
    encoding = unicode_encoding(data) or "utf-8"
    if encoding == "utf-8":
        return data.removeprefix(codecs.BOM_UTF8)
    return data.decode(encoding).removeprefix("\ufeff").encode("utf-8")


def plain_csv(data: bytes) -> bytes:
    """Return CSV that Polars reads as Python's csv reads `data`; well-formed data is returned unchanged.

    Polars takes each quote for the start or the end of a text with commas and lines, also the one in
    `a 3" nail`. Lines may end in a carriage return, as old programs for the Mac write them.

    Raises:
        csv.Error: A quote is not closed, see `_unclosed_quote`.
    """
    is_well_formed = b'"' not in data or b'"' not in _QUOTED_FIELD.sub(b"", data)
    header_end = next((match[2] for match in _fields(data) if match[2] != b","), b"")
    if is_well_formed and header_end != b"\r":
        return data

    parts: list[bytes] = []
    end = 0
    for match in _fields(data):
        parts += [_in_quotes(match[1]), b"\n" if match[2] == b"\r" else match[2]]
        end = match.end()
    if end < len(data):
        raise csv.Error("a quote is not closed")
    return b"".join(parts)


def _fields(data: bytes) -> Iterator[re.Match[bytes]]:
    """Yield the fields of CSV up to the first quote that is not closed."""
    match = _FIELD_AND_END.match(data)
    while match is not None:
        yield match
        match = _FIELD_AND_END.match(data, match.end()) if match[2] else None


def _in_quotes(field: bytes) -> bytes:
    """Return a field with quotes in the form of the standard: in quotes, and its own quotes doubled."""
    quoted = re.match(_QUOTED, field)
    start = 0 if quoted is None else quoted.end()
    if b'"' not in field or start == len(field):
        return field

    # Only a quote at the start is syntax: "red" rose is the text red rose.
    text = field[1 : max(start - 1, 1)].replace(b'""', b'"') if quoted else b""
    text += field[start:]
    return b'"%b"' % text.replace(b'"', b'""')


def _unclosed_quote(data: bytes) -> int | None:
    """Return the number of the line in which a quote starts a field but does not end it, or None."""
    end = max((match.end() for match in _fields(data)), default=0)
    return None if end == len(data) else len(data[: end + 1].splitlines())


def _read_json_lines(settings: DatasetSettings, data: bytes) -> pl.DataFrame:
    if b"\n" not in data:
        data = data.replace(b"\r", b"\n")  # JSON escapes these characters inside texts
    _require_bounded_json_lines(data)
    table = pl.read_ndjson(io.BytesIO(data), infer_schema_length=None)

    # If some rows have a text and others a list, Polars returns the lists as JSON text.
    suspected = [
        name
        for name in settings.captions.columns
        if table.schema.get(name) == pl.String and table[name].str.contains(r"^[\[{]").any()
    ]
    if not suspected:
        return table
    return table.with_columns(_mixed_columns(settings, io.BytesIO(data), suspected))


def _require_bounded_csv(data: bytes) -> None:
    num_columns = 0
    for match in _fields(data):
        num_columns += 1
        if match[2] != b"," or num_columns > MAX_COLUMNS:
            break
    _require_table_size(data, num_columns)


def _require_bounded_json_lines(data: bytes) -> None:
    """Raise RefusedFileError for JSON lines whose table would not fit into memory.

    Raises:
        RefusedFileError: A line is too long or too deep, or there are too many keys.
        pl.exceptions.PolarsError: The lines are not valid.
    """
    fields: set[str] = set()
    start = 0
    while start < len(data):
        end = data.rfind(b"\n", start, start + _CHECKED_BYTES) + 1
        end = end or data.find(b"\n", start, start + MAX_LINE_BYTES) + 1 or len(data)
        if end - start > MAX_LINE_BYTES:
            detail = f"line {_line_number(data, start)} must have at most {MAX_LINE_BYTES:,} bytes"
            raise RefusedFileError("too_large", detail, fix="write one JSON object per line")

        _require_flat(data, start, end)
        if not data[start:end].isspace():
            lines = pl.scan_ndjson(io.BytesIO(data[start:end]), infer_schema_length=None)
            fields.update(_field_names("", pl.Struct(lines.collect_schema())))
        _require_table_size(data, len(fields))
        start = end


def _require_flat(data: bytes, start: int, end: int) -> None:
    for line in data[start:end].split(b"\n"):
        # Texts are looked for only in the rare lines that may be nested deeply.
        brackets = _JSON_TOKEN.finditer(line) if line.count(b"{") + line.count(b"[") > MAX_DEPTH else ()
        depth = 0
        for match in brackets:
            depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(match[0], 0)
            if depth > MAX_DEPTH:
                number = _line_number(data, start)
                detail = (
                    f"lists and objects must be nested at most {MAX_DEPTH} deep, got more in line {number}"
                )
                raise RefusedFileError("too_deep", detail, fix="write texts, numbers and lists of texts only")
        start += len(line) + 1


def _line_number(data: bytes, position: int) -> int:
    return data.count(b"\n", 0, position) + 1


def _field_names(prefix: str, kind: pl.DataType) -> Iterator[str]:
    """Yield the paths of the columns of a table, and of all fields inside them."""
    while isinstance(kind, (pl.List, pl.Array)):
        kind = cast("pl.DataType", kind.inner)
    if not isinstance(kind, pl.Struct):
        yield prefix
        return
    for field in kind.fields:
        yield from _field_names(f"{prefix}\0{field.name}", cast("pl.DataType", field.dtype))


def _require_table_size(data: bytes, num_columns: int) -> None:
    fix = "remove the columns that training does not need, or write the manifest as Parquet"
    if num_columns > MAX_COLUMNS:
        detail = f"it must have at most {MAX_COLUMNS:,} columns, got {num_columns:,} or more"
        raise RefusedFileError("too_many_columns", detail, fix=fix)
    num_cells = num_columns * (data.count(b"\n") + data.count(b"\r") + 1)
    if num_cells > max(MAX_CELLS, len(data)):
        detail = f"it must have at most {MAX_CELLS:,} cells if most have no value, got {num_cells:,}"
        raise RefusedFileError("too_many_cells", detail, fix=fix)


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


def _opened(settings: DatasetSettings, max_bytes: int) -> io.BufferedReader | io.BytesIO:
    path = settings.path
    if not isinstance(path, Url):
        if settings.follow_links:
            return open_regular(path, max_bytes=max_bytes)
        # Like a caption file, it holds texts that are published with the LoRA.
        return InsideFolder(path.parent).open(path.name, max_bytes=max_bytes)
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
        with _opened(settings, max_bytes) as file:
            data = file.read()
    except OSError as read_error:
        return str(read_error.strerror or read_error), "correct datasets[].path, or make the file readable"

    if suffix != ".parquet":
        encoding = unicode_encoding(data) or "utf-8"
        try:
            data = _as_utf8(data)
            data.decode("utf-8-sig")
        except UnicodeDecodeError as decode_error:
            start = decode_error.start
            line = data[:start].decode(encoding, "ignore").count("\n") + 1
            what = f"byte 0x{data[start]:02x} in line {line} is not valid {encoding.upper()}"
            return what, "save the file as UTF-8"

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
    line = _unclosed_quote(data)
    if line is not None:
        problem = "has a text that starts with a quote and does not end with one"
        fix = 'put the text in double quotes, and write each quote in it twice: rose.jpg,"a ""red"" rose"'
        return _BadLine(line, problem, fix)

    num_columns, num_fields = 0, 0
    for match in _fields(data):
        num_fields += 1
        if match[2] == b",":
            continue
        num_columns = num_columns or num_fields
        if num_fields > num_columns:
            problem = f"has {num_fields} fields, but the header has {num_columns}"
            fix = 'put texts that contain commas in double quotes: rose.jpg,"red, wet"'
            return _BadLine(len(data[: match.end()].splitlines()), problem, fix)
        num_fields = 0
    return None
