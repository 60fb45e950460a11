"""What Dagster keeps of a materialization: the table, its data version, and numbers worth looking at."""

import base64
import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dagster import (
    DataVersion,
    JsonMetadataValue,
    MaterializeResult,
    MetadataValue,
    TableColumn,
    TableMetadataValue,
    TableRecord,
    TableSchema,
)

from pipeline.recipe import Recipe
from pipeline.reporting.reports import Report, StageResult, write_report

VOLATILE_COLUMNS = ("mtime_ns", "ctime_ns", "inode", "scanned_ns")
"""Stat values, of sources and (with `entry_`) of store entries: they may differ where the content doesn't."""

MAX_PICTURES_BYTES = 200_000
"""Of one asset: they are kept in Dagster's event log, once a materialization."""

PICTURE_KINDS = {".png": "image/png", ".jpg": "image/jpeg"}

MAX_REASONS = 20
MAX_PREVIEW_ROWS = 5

_PREVIEW_CHARACTERS = 48
_NOT_IN_PREVIEW = {"dataset", "path", "key", "more_captions", "duplicate_group", *VOLATILE_COLUMNS}
"""Parts of the sample's id, and what only a machine compares; so do hashes, and facts of an entry's file."""

_ONE_LINE = 60
"""Characters of a text that the UI shows whole; it cuts longer ones off, unless they are Markdown."""

_LONG = (JsonMetadataValue, TableMetadataValue)

Metadata = Mapping[str, MetadataValue[Any]]

NONE: Metadata = {}


def publish(
    recipe: Recipe,
    asset: str,
    result: StageResult,
    *,
    pictures: Metadata = NONE,
    files: Metadata = NONE,
) -> MaterializeResult[Any]:
    """The asset's result: writes its rejected rows and its report, and describes the table.

    Pictures come first; then numbers, and what takes more room; then what there is to say of `files`.

    The data version is a hash of what the table says and of the run that made it, if it was trained, so that
    making the same again leaves everything downstream as fresh as it was.
    """
    from pipeline.storage.tables import Tables

    Tables(recipe.output_dir).write_rejected(asset, result.rejected)
    report = write_report(recipe.output_dir, asset, result.report)
    shown = report_metadata({**result.report, "rejected_by_reason": None})
    metadata: dict[str, Any] = {
        **pictures,
        "rejected_by_reason": MetadataValue.md(_rejected_funnel(result)),
        **{name: value for name, value in shown.items() if not isinstance(value, _LONG)},
        **{name: value for name, value in shown.items() if isinstance(value, _LONG)},
        **files,
        "report": MetadataValue.path(str(report)),
        "first_rows": table_metadata(_preview(result.table)),
    }
    version = DataVersion(content_version(result.table, run=result.report.get("run", "")))
    return MaterializeResult(value=result.table, metadata=metadata, data_version=version)


def content_version(table: Any, *, run: str = "") -> str:
    """16 hex digits over a Polars table without `VOLATILE_COLUMNS`; the order of its rows counts.

    Args:
        table: A Polars frame.
        run: Id of a training run: other weights may come of the same table.
    """
    from pipeline.storage.tables import content_digest

    kept = [name for name in table.columns if name.removeprefix("entry_") not in VOLATILE_COLUMNS]
    return content_digest(table.select(kept), more=run)[:16]


def picture_metadata(folder: Path) -> dict[str, MetadataValue[Any]]:
    """Each picture in `folder` as `picture_<file's name>`, those that stay below `MAX_PICTURES_BYTES`.

    A folder that is not there holds none.
    """
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    drawn = _drawn([path for path in paths if path.suffix in PICTURE_KINDS])
    return {f"picture_{path.stem}": MetadataValue.md(picture) for path, picture in drawn.items()}


def captioned(pictures: Mapping[Path, str]) -> MetadataValue[Any]:
    """Pictures below one another, each with its caption, those that stay below `MAX_PICTURES_BYTES`.

    Captions are Markdown: `escaped`, where they come from outside.
    """
    drawn = _drawn([path for path in pictures if path.is_file()])
    return MetadataValue.md("\n\n".join(f"{picture}\n\n{pictures[path]}" for path, picture in drawn.items()))


def _drawn(paths: Sequence[Path]) -> dict[Path, str]:
    """Markdown that holds the pictures themselves, so that any browser shows them."""
    drawn: dict[Path, str] = {}
    left_bytes = MAX_PICTURES_BYTES
    for path in paths:
        if path.stat().st_size <= left_bytes:
            data = path.read_bytes()
            left_bytes -= len(data)
            text = base64.b64encode(data).decode("ascii")
            drawn[path] = f"![{path.stem}](data:{PICTURE_KINDS[path.suffix]};base64,{text})"
    return drawn


def report_metadata(report: Report) -> dict[str, MetadataValue[Any]]:
    """Numbers as numeric metadata, which Dagster plots over time; the rest as text, tables or JSON.

    Nothing empty, and no curves (lists of lists): those are in the report's file, and drawn.
    """
    said = {name: value for name, value in report.items() if value not in (None, [], {}, ())}
    return {name: _value(value) for name, value in said.items() if not _is_curve(value)}


def table_metadata(rows: Sequence[Mapping[str, Any]]) -> TableMetadataValue:
    """Rows as a table; a column that any row has, in the order met; what a row lacks is empty text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    records = [TableRecord({name: _cell(row.get(name)) for name in names}) for row in rows]
    return MetadataValue.table(records, schema=TableSchema([TableColumn(name) for name in names]))


def escaped(text: str) -> str:
    """`text` such that Markdown shows it as it is, on one line: file names and captions come from outside."""
    plain = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_{}\[\]()#+!|~-])", r"\\\1", plain)


def _preview(table: Any) -> list[dict[str, Any]]:
    """The first rows with the columns that a person reads, long texts cut."""
    names = [
        name
        for name in table.columns
        if name not in _NOT_IN_PREVIEW and not name.endswith("hash") and not name.startswith("entry_")
    ]
    rows: list[dict[str, Any]] = table.select(names).head(MAX_PREVIEW_ROWS).to_dicts()
    return [{name: _shortened(value) for name, value in row.items()} for row in rows]


def _shortened(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _PREVIEW_CHARACTERS:
        return value[:_PREVIEW_CHARACTERS] + "…"
    return value


def _rejected_funnel(result: StageResult) -> str:
    numbers = " → ".join(
        f"{name} {result.report[name]}" for name in ("in", "kept", "rejected") if name in result.report
    )
    if result.rejected.is_empty():
        return f"{numbers}\n\nnothing was rejected"
    counts = result.rejected["reason"].value_counts(sort=True).head(MAX_REASONS).to_dicts()
    lines = [f"| {escaped(row['reason'])} | {row['count']} |" for row in counts]
    return "\n".join([numbers, "", "| reason | samples |", "|---|---|", *lines])


def _value(value: Any) -> MetadataValue[Any]:
    if isinstance(value, bool):
        return MetadataValue.bool(value)
    if isinstance(value, int):
        return MetadataValue.int(value)
    if isinstance(value, float):
        return MetadataValue.float(_rounded(value))
    if isinstance(value, list) and all(isinstance(row, Mapping) for row in value):
        return table_metadata(cast("list[Mapping[str, Any]]", value))
    if isinstance(value, str):
        return MetadataValue.text(value) if len(value) <= _ONE_LINE else MetadataValue.md(escaped(value))
    return MetadataValue.json(value)


def _is_curve(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(point, list) for point in cast("list[Any]", value))


def _cell(value: Any) -> str | int | float | bool:
    if value is None:
        return ""
    if isinstance(value, float):
        return _rounded(value)
    return value if isinstance(value, str | int | float | bool) else str(value)


def _rounded(value: float) -> float:
    """To six digits: what comes after them is no news to a reader."""
    return float(f"{value:.6g}")
