"""A dataset that is a listing: a table with a row an image, its path and whatever else is known of it.

A path is relative to the dataset's root. One that leads out of it, by `..`, by being absolute, by a link or
by being an address elsewhere, is refused: whoever wrote the listing need not be who runs the job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from stat import S_ISLNK, S_ISREG
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import DatasetError
from pipeline.images.formats import ImageError
from pipeline.raw_images.local_folder import Found, Problem, Walk
from pipeline.raw_images.manifest_file import read_listing
from pipeline.storage.addresses import Url, is_url
from pipeline.storage.source import NO_FILE, Source, to_int64

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings


def relative(settings: DatasetSettings) -> Callable[[str], str]:
    """What makes a row's path relative to the dataset's root, in its shortest form.

    A whole path or address that begins with the root's is one below it; any other is as it is, and leads out.
    """
    root = str(settings.root).rstrip("/") + "/"
    if not isinstance(settings.root, Url):
        return lambda said: said if _is_address(said) else os.path.normpath(said).removeprefix(root)

    def below(said: str) -> str:
        inside = said.removeprefix(root).lstrip("/") if said.startswith(root) else said
        return inside if _is_address(inside) else os.path.normpath(inside)

    return below


def _is_address(path: str) -> bool:
    """Whether it names a server or an archive; a path in its shortest form has no two slashes in a row."""
    return "://" in path and is_url(path)


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
    path_of = relative(settings)
    for said in read_listing(settings)[settings.path_column]:
        if not said:
            found.passed_over["rows_without_path"] += 1
            continue
        path = path_of(said)
        if path in seen:
            found.passed_over["listed_twice"] += 1
            continue
        seen.add(path)
        if path == ".." or path.startswith(("/", "../")) or _is_address(path):
            detail = f"the listing's path {said!r} leads out of {source.address}"
            fix = "write paths relative to that folder, or set datasets[].images to the one they lie in"
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
    """Of each path, the texts in its caption columns, in order.

    A column of lists holds several texts a row. A path that is listed several times has the texts of all of
    its rows, none twice; those of which `filters.where` is not true do not count.

    Raises:
        DatasetError: A caption column holds neither texts nor lists of them; or as `paths_where`.
    """
    if settings.filters.where is not None:
        table = _chosen(settings, table)
    columns = [_texts(settings, table[name]) for name in settings.captions.columns]
    path_of = relative(settings)
    found: dict[str, tuple[str, ...]] = {}
    for said, *cells in zip(table[settings.path_column].to_list(), *columns, strict=True):
        if said:
            path, texts = path_of(said), _of_row(cells)
            known = found.get(path)
            found[path] = texts if known is None else tuple(dict.fromkeys((*known, *texts)))
    return found


def _texts(settings: DatasetSettings, column: pl.Series) -> list[str | list[str | None] | None]:
    """Of each row, its text or its list of texts."""
    many = isinstance(column.dtype, (pl.List, pl.Array))
    one = column.dtype.inner if isinstance(column.dtype, (pl.List, pl.Array)) else column.dtype
    if isinstance(one, (pl.List, pl.Array, pl.Struct, pl.Binary, pl.Object)):
        what = f"the column {column.name!r} holds {column.dtype}, and not captions"
        fix = "let datasets[].captions.columns name columns of text, or of lists of texts"
        raise DatasetError(what, where=str(settings.path), fix=fix)
    return column.cast(pl.List(pl.String) if many else pl.String).to_list()


def _of_row(cells: Sequence[str | list[str | None] | None]) -> tuple[str, ...]:
    """The texts of one row's caption columns that hold any."""
    texts = (text for cell in cells for text in (cell if isinstance(cell, list) else [cell]))
    return tuple(text for text in texts if text and text.strip())


def paths_where(settings: DatasetSettings, table: pl.DataFrame) -> set[str]:
    """Paths of the rows for which `filters.where` is true.

    Raises:
        DatasetError: It is no SQL expression over the listing's columns.
    """
    path_of = relative(settings)
    return {path_of(path) for path in _chosen(settings, table)[settings.path_column] if path}


def _chosen(settings: DatasetSettings, table: pl.DataFrame) -> pl.DataFrame:
    """The rows for which `filters.where` is true."""
    where = settings.filters.where
    assert where is not None
    try:
        return table.filter(pl.sql_expr(where))
    except (pl.exceptions.PolarsError, ValueError, TypeError) as err:
        columns = ", ".join(f"{name} ({kind})" for name, kind in table.schema.items())
        raise DatasetError(
            f"filters.where {where!r} cannot be applied: {err}",
            where=str(settings.path),
            fix=f"write an SQL expression that is true or false, over its columns: {columns}",
        ) from err


def focus_by_path(settings: DatasetSettings, table: pl.DataFrame) -> dict[str, tuple[float, float]]:
    """Of each path, the point to keep in view: shares of the width and of the height, 0.5 where none is said.

    Of a path that is listed several times the first row counts, of those for which `filters.where` is true.

    Raises:
        DatasetError: A column does not hold numbers; or as `paths_where`.
    """
    assert settings.focus_columns is not None
    if settings.filters.where is not None:
        table = _chosen(settings, table)
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
    path_of = relative(settings)
    first: dict[str, tuple[float, float]] = {}
    for path, across, down in rows.rows():
        if path:
            first.setdefault(path_of(path), (across, down))
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
    fix = "correct the listing, or put the file there"
    return Problem(path, "not_found", detail, "write / in its paths, not \\" if "\\" in path else fix)


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
    return Found(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, to_int64(stat.st_ino), stat.st_dev)


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
        if each.is_manifest and any(asks):
            yield each, read_listing(each)
