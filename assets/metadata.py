"""The Dagster metadata of a materialization: numbers, first rows and a data version."""

import math
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
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

from pipeline.escaping import markdown_text, printable_lines
from pipeline.log import Log, discard
from pipeline.recipe import Recipe, project_root
from pipeline.reporting.reports import Report, StageResult, write_report
from resources.tables import file_metadata

VOLATILE_COLUMNS = ("mtime_ns", "ctime_ns", "inode", "scanned_ns")
"""Columns with file stats of sources and, after `entry_`, of cache entries."""

BUCKET_HEADER = "bucket (height x width)"

GIT_TIMEOUT_S = 5.0
"""Longest wait for Git, which may wait for a file system."""

MAX_REASONS = 20
MAX_PREVIEW_ROWS = 5

_PREVIEW_CHARACTERS = 48
_NOT_IN_PREVIEW = {
    "dataset",
    "path",
    "key",
    "more_captions",
    "duplicate_group",
    "view_group",
    *VOLATILE_COLUMNS,
}
"""Columns that repeat parts of the sample id, or that only the program compares."""

_MAX_TEXT_CHARACTERS = 60
"""Maximum length of a text that the UI shows without truncation; longer ones become Markdown."""

_LONG_VALUES = (JsonMetadataValue, TableMetadataValue)

MIB = 2**20

_FLATTENED = {"settings": "", "overrides": "override_", "plan": "plan_"}
"""Prefix of the names of the values in a section of a report."""

Metadata = Mapping[str, MetadataValue[Any]]

_NO_METADATA: Metadata = {}


def publish(
    recipe: Recipe,
    asset: str,
    result: StageResult,
    *,
    log: Log = discard,
    pictures: Metadata = _NO_METADATA,
    files: Metadata = _NO_METADATA,
) -> MaterializeResult[Any]:
    """Write the rejected rows and the report of a stage, and return its table with metadata.

    `log` receives a line for each damaged file with rejected rows of another stage.
    """
    from pipeline.storage.tables import Tables

    Tables(recipe.output_dir, log=log).write_rejected(asset, result.rejected)

    # The name shows to which of several recipes an output folder belongs.
    report = write_report(recipe.output_dir, asset, {**result.report, "recipe": recipe.name})

    # The funnel shows the reasons as a table.
    values = report_metadata(
        {**_plotted(result.report), "rejected_by_reason": None, "git_commit": git_commit()}
    )
    funnel = {"rejected_by_reason": MetadataValue.md(_rejected_funnel(result))}

    # The UI shows metadata in this order.
    metadata: dict[str, Any] = {
        **pictures,
        **(funnel if "in" in result.report else {}),
        **{name: value for name, value in values.items() if not isinstance(value, _LONG_VALUES)},
        **{name: value for name, value in values.items() if isinstance(value, _LONG_VALUES)},
        **files,
        "report": output_file(recipe, report),
        "first_rows": table_metadata(_preview(result.table)),
    }

    # A hash of the content, so that an equal result leaves downstream assets fresh.
    version = DataVersion(content_version(result.table, run=result.report.get("run", "")))
    return MaterializeResult(value=result.table, metadata=metadata, data_version=version)


def output_file(recipe: Recipe, path: Path) -> MetadataValue[Any]:
    """Return a file or folder below the recipe's output folder, by its address if that is at one."""
    return file_metadata(recipe.output_address, recipe.output_dir, path)


def content_version(table: Any, *, run: str = "") -> str:
    """Return 16 hex digits over a table without `VOLATILE_COLUMNS`. The order of the rows matters.

    `run` is the id of a training run, because one table may lead to different weights.
    """
    from pipeline.storage.tables import content_digest

    # Stats may change while the content stays equal, also in columns that end in `_stats`.
    columns = [
        name
        for name in table.columns
        if name.rpartition("entry_")[2] not in VOLATILE_COLUMNS and not name.endswith("_stats")
    ]
    return content_digest(table.select(columns), more=run)[:16]


def report_metadata(report: Report) -> dict[str, MetadataValue[Any]]:
    """Return numbers as numeric metadata, which Dagster plots over time; the rest as text, tables or JSON.

    Empty values and curves (lists of lists) are omitted. The report file has the curves, and a picture shows
    them.
    """
    values = {name: value for name, value in report.items() if value not in (None, [], {}, ())}
    return {name: _metadata_value(value) for name, value in values.items() if not _is_curve(value)}


def table_metadata(rows: Sequence[Mapping[str, Any]]) -> TableMetadataValue:
    """Return rows as a table of all their columns, in order of appearance; a missing value is empty text.

    The UI shows the column `bucket` as `BUCKET_HEADER`, which gives the order of a bucket's edges.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    headers = {name: BUCKET_HEADER if name == "bucket" else name for name in names}
    records = [TableRecord({headers[name]: _cell(row.get(name)) for name in names}) for row in rows]
    return MetadataValue.table(records, schema=TableSchema([TableColumn(headers[name]) for name in names]))


@cache
def git_commit() -> str | None:
    """Return the commit of the project, with "-dirty" if a file of it has changed; None without Git."""
    # Without optional locks, because the project may be read-only.
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        process = subprocess.run(
            command, cwd=project_root(), capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None


def _plotted(report: Report) -> dict[str, Any]:
    """Return the report with single numbers in readable units, because Dagster plots only such values."""
    shown: dict[str, Any] = {}
    for name, value in report.items():
        if name in _FLATTENED:
            prefix = _FLATTENED[name]
            shown |= {f"{prefix}{key}": each for key, each in value.items() if f"{prefix}{key}" not in report}
        elif name == "files":
            shown[name] = [{"file": file, "size": f"{size / MIB:,.1f} MiB"} for file, size in value.items()]
        elif name.endswith("memory_bytes"):
            shown[f"{name.removesuffix('bytes')}gib"] = None if value is None else value / 2**30
        elif name == "bytes":
            shown["size_mib"] = value / MIB
        else:
            shown[name] = value
    return shown


def _preview(table: Any) -> list[dict[str, Any]]:
    from pipeline.storage.tables import SIDE_INPUT_COLUMNS

    of_side_inputs = (names for tables in SIDE_INPUT_COLUMNS.values() for names in tables.values())
    hidden = _NOT_IN_PREVIEW.union(*of_side_inputs)
    names = [
        name
        for name in table.columns
        if name not in hidden and not name.endswith("hash") and not name.startswith("entry_")
    ]
    # The UI cuts off the last columns of a wide table.
    names.sort(key=lambda name: name not in ("sample_id", "caption"))
    rows: list[dict[str, Any]] = table.select(names).head(MAX_PREVIEW_ROWS).to_dicts()
    return [{name: _truncated(value) for name, value in row.items()} for row in rows]


def _truncated(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _PREVIEW_CHARACTERS:
        return value[:_PREVIEW_CHARACTERS] + "…"
    return value


def _rejected_funnel(result: StageResult) -> str:
    numbers = " → ".join(
        f"{name} {result.report[name]}" for name in ("in", "kept", "rejected") if name in result.report
    )
    if result.rejected.is_empty():
        return f"{numbers}\n\nno samples were rejected"
    counts = result.rejected["reason"].value_counts(sort=True).head(MAX_REASONS).to_dicts()
    lines = [f"| {markdown_text(row['reason'])} | {row['count']} |" for row in counts]
    return "\n".join([numbers, "", "| reason | samples |", "|---|---|", *lines])


def _metadata_value(value: Any) -> MetadataValue[Any]:
    if isinstance(value, bool):
        return MetadataValue.bool(value)
    if isinstance(value, int):
        return MetadataValue.int(value)
    if isinstance(value, float):
        return MetadataValue.float(_rounded(value))
    if isinstance(value, list) and all(isinstance(row, Mapping) for row in value):
        return table_metadata(cast("list[Mapping[str, Any]]", value))
    if isinstance(value, str):
        fits = len(value) <= _MAX_TEXT_CHARACTERS
        return MetadataValue.text(printable_lines(value)) if fits else MetadataValue.md(markdown_text(value))
    return MetadataValue.json(_printable(value))


def _printable(value: Any) -> Any:
    """Return a JSON value with escapes for control characters in its texts and names."""
    if isinstance(value, str):
        return printable_lines(value)
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, Mapping):
        return {_printable(name): _printable(item) for name, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in cast("Sequence[Any]", value)]
    return value


def _is_curve(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(point, list) for point in cast("list[Any]", value))


def _cell(value: Any) -> str | int | float | bool:
    if value is None:
        return ""
    if isinstance(value, float):
        return _finite(_rounded(value))
    return value if isinstance(value, int | bool) else printable_lines(str(value))


def _finite(value: float) -> float | str:
    # JSON has no such numbers: the UI would leave out the row of a table, or the entry.
    return value if math.isfinite(value) else str(value)


def _rounded(value: float) -> float:
    """Round to six significant digits."""
    return float(f"{value:.6g}")
