"""A dataset that is a listing: a table with a row an image, its path and whatever else is known of it.

A path is relative to the dataset's root. One that leads out of it, by `..`, by being absolute or by a link,
is refused: whoever wrote the listing need not be who runs the job.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from stat import S_ISLNK, S_ISREG
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.addresses import Url
from pipeline.errors import DatasetError
from pipeline.image_formats import ImageError
from pipeline.ingest.folder import Found, Problem, Walk
from pipeline.source import NO_FILE, Source, signed, source_at

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings

_READERS: dict[str, Any] = {
    ".parquet": pl.read_parquet,
    ".jsonl": lambda file: pl.read_ndjson(file, infer_schema_length=None),
    ".csv": lambda file: pl.read_csv(file, infer_schema_length=None),
}


def read_listing(settings: DatasetSettings) -> pl.DataFrame:
    """The listing as a table, its column of paths as text.

    Raises:
        DatasetError: It cannot be read, or a column that the recipe names is not in it.
    """
    path = settings.path
    file = path
    try:
        if isinstance(path, Url):
            file = io.BytesIO(source_at(path.parent).read(path.name))
        table = _READERS[path.suffix.lower()](file)
    except (OSError, pl.exceptions.PolarsError, UnicodeDecodeError) as err:
        fix = "correct datasets[].path, or write the file anew: Parquet, JSON lines or CSV, in UTF-8"
        raise DatasetError(f"the listing cannot be read: {err}", where=str(path), fix=fix) from err
    named: dict[str, tuple[str, ...]] = {"datasets[].path_column": (settings.path_column,)}
    if settings.captions.from_ == "column":
        named["datasets[].captions.columns"] = settings.captions.columns
    if settings.focus_columns is not None:
        named["datasets[].focus_columns"] = settings.focus_columns
    for key, columns in named.items():
        missing = [column for column in columns if column not in table.columns]
        if missing:
            what = f"the listing has no column {missing[0]!r}; it has {', '.join(map(repr, table.columns))}"
            raise DatasetError(what, where=str(path), fix=f"set {key} to columns that it has")
    return table.with_columns(pl.col(settings.path_column).cast(pl.String))


def walk_listing(settings: DatasetSettings, source: Source, *, found: Walk | None = None) -> Walk:
    """What the listing names, as `folder.walk` has it; the folder itself is not searched.

    Args:
        settings: Of the dataset.
        source: Its files.
        found: As for `folder.walk`.

    Raises:
        DatasetError: As `read_listing`.
    """
    found = found or Walk()
    seen: set[str] = set()
    paths: list[str] = []
    for said in read_listing(settings)[settings.path_column]:
        if not said:
            found.passed_over["rows_without_path"] += 1
            continue
        path = os.path.normpath(said)
        if path in seen:
            found.passed_over["listed_twice"] += 1
            continue
        seen.add(path)
        if path == ".." or path.startswith(("/", "../")):
            detail = f"the listing's path {said!r} leads out of {source.address}"
            fix = "list paths below datasets[].images"
            found.problems.append(Problem(said, "outside_dataset", detail, fix))
        else:
            paths.append(path)
    root = settings.root
    for looked in _looked_here(root, paths) if isinstance(root, Path) else _looked_there(source, paths):
        if isinstance(looked, Found):
            found.images.append(looked)
        else:
            found.problems.append(looked)
    return found


def captions_by_path(settings: DatasetSettings, table: pl.DataFrame) -> dict[str, tuple[str, ...]]:
    """Of each path, the texts in its caption columns; those without any text are left out."""
    columns = settings.captions.columns
    rows = table.select(settings.path_column, *(pl.col(name).cast(pl.String) for name in columns)).rows()
    first: dict[str, tuple[str, ...]] = {}
    for path, *texts in rows:
        if path:
            first.setdefault(os.path.normpath(path), tuple(text for text in texts if text and text.strip()))
    return first


def paths_where(settings: DatasetSettings, table: pl.DataFrame) -> set[str]:
    """Paths of the rows for which `filters.where` is true.

    Raises:
        DatasetError: It is no SQL expression over the listing's columns.
    """
    where = settings.filters.where
    assert where is not None
    try:
        chosen = table.filter(pl.sql_expr(where))
    except (pl.exceptions.PolarsError, ValueError, TypeError) as err:
        columns = ", ".join(f"{name} ({kind})" for name, kind in table.schema.items())
        raise DatasetError(
            f"filters.where {where!r} cannot be applied: {err}",
            where=str(settings.path),
            fix=f"write an SQL expression that is true or false, over its columns: {columns}",
        ) from err
    return {os.path.normpath(path) for path in chosen[settings.path_column] if path}


def focus_by_path(settings: DatasetSettings, table: pl.DataFrame) -> dict[str, tuple[float, float]]:
    """Of each path, the point to keep in view: shares of the width and of the height, 0.5 where none is said.

    Raises:
        DatasetError: A column does not hold numbers.
    """
    assert settings.focus_columns is not None
    rows = table.select(settings.path_column)
    for name in settings.focus_columns:
        try:
            rows = rows.hstack([table[name].cast(pl.Float64).fill_null(0.5)])
        except pl.exceptions.PolarsError as err:
            raise DatasetError(
                f"the column {name!r} holds {table[name].dtype} that are no numbers: {err}",
                where=str(settings.path),
                fix="let datasets[].focus_columns name columns of numbers from 0 to 1",
            ) from err
    first: dict[str, tuple[float, float]] = {}
    for path, across, down in rows.rows():
        if path:
            first.setdefault(os.path.normpath(path), (across, down))
    return first


def focus_of(focuses: Mapping[str, tuple[float, float]], path: str) -> tuple[float, float]:
    """Of one path, the point as `focus_by_path` has it; the middle where nothing is said.

    Raises:
        ImageError: It lies outside of the image.
    """
    across, down = focuses.get(path, (0.5, 0.5))
    if not (0.0 <= across <= 1.0 and 0.0 <= down <= 1.0):
        raise ImageError(
            "focus_outside",
            f"its focus is ({across:g}, {down:g}), which is not inside of the image",
            fix="write x and y as shares of its width and height, from 0 to 1, or leave them empty",
            where=path,
        )
    return across, down


def _looked_there(source: Source, paths: Sequence[str]) -> Iterator[Found | Problem]:
    for path, stat in zip(paths, source.stats(paths).tolist(), strict=True):
        yield _not_found(path, "no such file") if tuple(stat) == NO_FILE else Found(path, *stat, device=0)


def _looked_here(root: Path, paths: Sequence[str]) -> Iterator[Found | Problem]:
    within = _inside_of(root)
    for path in paths:
        yield _look(root, path, within)


def _not_found(path: str, why: object) -> Problem:
    detail = f"the listing names it, and it cannot be found: {why}"
    return Problem(path, "not_found", detail, "correct the listing, or put the file there")


def _look(root: Path, path: str, within: Any) -> Found | Problem:
    file = f"{root}/{path}"
    try:
        stat = os.stat(file)  # noqa: PTH116 - a hundred thousand times, and without making a Path
        linked = S_ISLNK(os.lstat(file).st_mode)
    except (OSError, ValueError) as err:  # ValueError: a null character
        return _not_found(path, getattr(err, "strerror", None) or err)
    if not within(os.path.dirname(file), file if linked else None):  # noqa: PTH120
        detail = "a link in its path leads out of the dataset's folder"
        return Problem(path, "outside_dataset", detail, "put the image itself there in place of the link")
    if not S_ISREG(stat.st_mode):
        return Problem(path, "special_file", "it is no regular file", "remove it from the listing")
    return Found(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, signed(stat.st_ino), stat.st_dev)


def _inside_of(root: Path) -> Any:
    """Whether a folder, and a linked file in it, really lie below `root`; each folder is asked once."""
    real_root = os.path.realpath(root)

    def below(path: str) -> bool:
        real = os.path.realpath(path)
        return real == real_root or real.startswith(real_root.rstrip("/") + "/")

    folder_below = cache(below)
    return lambda folder, linked: folder_below(folder) and (linked is None or below(linked))


def listed_columns(settings: Sequence[DatasetSettings]) -> Iterator[tuple[DatasetSettings, pl.DataFrame]]:
    """The listings among some datasets that a later stage needs more of than paths."""
    for each in settings:
        asks = (each.captions.from_ == "column", each.filters.where, each.focus_columns)
        if each.is_listing and any(asks):
            yield each, read_listing(each)
