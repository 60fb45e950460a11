"""Use a manifest as a dataset: a table with one row per image, its path and optional further columns.

Paths are relative to the dataset's root. A path that leads out of it is rejected, whether through `..`, an
absolute path, a link or another address.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from stat import S_ISLNK, S_ISREG
from typing import TYPE_CHECKING

import polars as pl

from pipeline.errors import DatasetError
from pipeline.images.formats import ImageError
from pipeline.raw_images.folder import FoundFile, Problem, WalkResult
from pipeline.raw_images.manifest_file import read_manifest
from pipeline.raw_images.where_process import rows_where
from pipeline.storage.addresses import Url, is_url
from pipeline.storage.source import NO_FILE, Source, to_int64

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings

CENTRE = (0.5, 0.5)
"""Default focus point: the middle of the image."""

_CaptionCell = str | list[str | None] | None


def walk_manifest(
    settings: DatasetSettings, source: Source, *, result: WalkResult | None = None
) -> WalkResult:
    """Look up the files that the manifest names; the folder itself is not searched.

    `result` and errors are as in `folder.walk_local` and `read_manifest`.
    """
    result = result or WalkResult()
    seen: set[str] = set()
    paths: list[str] = []
    normalize = path_normalizer(settings)
    for written in read_manifest(settings, max_bytes=source.max_file_bytes)[settings.path_column]:
        if not written:
            result.passed_over["rows_without_path"] += 1
            continue
        path = normalize(written)
        if path in seen:
            result.passed_over["listed_twice"] += 1
            continue

        seen.add(path)

        # The author of the manifest may not be the person who runs the job.
        if path == ".." or path.startswith(("/", "../")) or _is_address(path):
            detail = f"the manifest's path {written!r} leads out of {source.address}"
            fix = "write paths relative to that folder, or set datasets[].images to the folder they are in"
            result.problems.append(Problem(written, "outside_dataset", detail, fix))
        else:
            paths.append(path)

    files = list(_looked_up(settings, source, paths))

    # macOS spells é with two characters and other systems with one, so a manifest may differ from the disk.
    find = _finder_of_other_forms(source)
    unusable = [file.path for file in files if isinstance(file, Problem) and not file.path.isascii()]
    respelled = {path: found for path in unusable if (found := find(path)) not in (None, path)}
    in_other_form = dict(zip(respelled, _looked_up(settings, source, list(respelled.values())), strict=True))

    for each in files:
        file = in_other_form.get(each.path, each) if isinstance(each, Problem) else each
        if isinstance(file, Problem):
            result.problems.append(file)
        elif file is not each and file.path in seen:
            result.passed_over["listed_twice"] += 1
        else:
            seen.add(file.path)
            result.images.append(file)
    return result


def composed(path: str) -> str:
    """Return a path in the Unicode form of sample ids, in which all spellings of a name are equal."""
    return unicodedata.normalize("NFC", path)


def _looked_up(
    settings: DatasetSettings, source: Source, paths: Sequence[str]
) -> Iterator[FoundFile | Problem]:
    root = settings.root
    if not isinstance(root, Path):
        return _remote_files(source, paths)
    is_inside = _inside_check(root)
    return (_local_file(root, path, is_inside) for path in paths)


def _finder_of_other_forms(source: Source) -> Callable[[str], str | None]:
    """Return a function that finds the file whose path differs from a given one only in Unicode form."""

    @cache
    def names_in(folder: str) -> dict[str, str]:
        return {composed(name): name for name in source.sibling_names(folder)}

    def find(path: str) -> str | None:
        found = ""
        for part in path.split("/"):
            name = names_in(found).get(composed(part))
            if name is None:
                return None
            found += f"{name}/"
        return found.removesuffix("/")

    return find


def path_normalizer(settings: DatasetSettings) -> Callable[[str], str]:
    """Return a function that makes a manifest's path relative to the dataset's root, in its shortest form.

    An absolute path or address below the root becomes relative. Paths outside the root stay outside, so that
    the scan can reject them.
    """
    root = str(settings.root).rstrip("/") + "/"
    if not isinstance(settings.root, Url):
        return lambda path: path if _is_address(path) else os.path.normpath(path).removeprefix(root)

    def normalize(path: str) -> str:
        below_root = path.removeprefix(root).lstrip("/") if path.startswith(root) else path
        return below_root if _is_address(below_root) else os.path.normpath(below_root)

    return normalize


def _is_address(path: str) -> bool:
    # A normalized path has no two slashes in a row.
    return "://" in path and is_url(path)


def _remote_files(source: Source, paths: Sequence[str]) -> Iterator[FoundFile | Problem]:
    for path, stat in zip(paths, source.stats(paths).tolist(), strict=True):
        if tuple(stat) == NO_FILE:
            yield _missing_file(path, "no such file")
        else:
            yield FoundFile(path, *stat, device=0)


def _local_file(root: Path, path: str, is_inside: Callable[[str, bool], bool]) -> FoundFile | Problem:
    full_path = f"{root}/{path}"
    try:
        stat = os.stat(full_path)  # noqa: PTH116 - called for every row; Path objects triple its time
        is_link = S_ISLNK(os.lstat(full_path).st_mode)
    except (OSError, ValueError) as err:  # ValueError: a null character
        return _missing_file(path, getattr(err, "strerror", None) or err)

    if not is_inside(full_path, is_link):
        detail = "a link in the path leads out of the dataset's folder"
        return Problem(path, "outside_dataset", detail, "replace the link with the image itself")
    if not S_ISREG(stat.st_mode):
        return Problem(path, "special_file", "it is not a regular file", "remove it from the manifest")
    times = to_int64(stat.st_mtime_ns), to_int64(stat.st_ctime_ns)
    return FoundFile(path, stat.st_size, *times, to_int64(stat.st_ino), stat.st_dev)


def _missing_file(path: str, why: object) -> Problem:
    detail = f"the manifest names this file, but it cannot be found: {why}"
    fix = "use / instead of \\ in its paths" if "\\" in path else "correct the manifest, or add the file"
    return Problem(path, "not_found", detail, fix)


def _inside_check(root: Path) -> Callable[[str, bool], bool]:
    """Return a function of (path, is_link) that checks whether a file is really below `root`."""
    real_root = os.path.realpath(root)

    def is_below(path: str) -> bool:
        real_path = os.path.realpath(path)
        return real_path == real_root or real_path.startswith(real_root.rstrip("/") + "/")

    folder_is_below = cache(is_below)  # resolves each folder once

    def is_inside(path: str, is_link: bool) -> bool:
        return folder_is_below(os.path.dirname(path)) and (not is_link or is_below(path))  # noqa: PTH120 - as above

    return is_inside


def manifests_with_columns(
    datasets: Sequence[DatasetSettings], *, max_bytes: int
) -> Iterator[tuple[DatasetSettings, pl.DataFrame]]:
    """Yield the datasets with a manifest that provides more than paths: captions, filters or focus points.

    Each table has its `selected_rows`.
    """
    for settings in datasets:
        uses_columns = settings.captions.from_ == "column" or settings.filters.where or settings.focus_columns
        if settings.is_manifest and uses_columns:
            yield settings, selected_rows(settings, read_manifest(settings, max_bytes=max_bytes))


def captions_by_path(settings: DatasetSettings, table: pl.DataFrame) -> dict[str, tuple[str, ...]]:
    """Return the texts in each path's caption columns, in order.

    The paths are `composed`. A column of lists holds several texts per row. A path with several rows gets the
    texts of all of them, without duplicates.

    Raises:
        DatasetError: A caption column holds neither texts nor lists of texts.
    """
    columns = [_caption_cells(settings, table[name]) for name in settings.captions.columns]
    normalize = path_normalizer(settings)
    captions: dict[str, dict[str, None]] = {}  # an ordered set of texts per path
    for written, *cells in zip(table[settings.path_column].to_list(), *columns, strict=True):
        if written:
            of_path = captions.setdefault(composed(normalize(written)), {})
            of_path.update(dict.fromkeys(_texts(cells)))
    return {path: tuple(texts) for path, texts in captions.items()}


def _caption_cells(settings: DatasetSettings, column: pl.Series) -> list[_CaptionCell]:
    is_list = isinstance(column.dtype, (pl.List, pl.Array))
    item_type = column.dtype.inner if isinstance(column.dtype, (pl.List, pl.Array)) else column.dtype
    if isinstance(item_type, (pl.List, pl.Array, pl.Struct, pl.Binary, pl.Object)):
        what = f"the column {column.name!r} must hold captions, got {column.dtype}"
        fix = "set datasets[].captions.columns to columns of text, or of lists of texts"
        raise DatasetError(what, where=str(settings.path), fix=fix)
    return column.cast(pl.List(pl.String) if is_list else pl.String).to_list()


def _texts(cells: Sequence[_CaptionCell]) -> list[str]:
    texts = (text for cell in cells for text in (cell if isinstance(cell, list) else [cell]))
    return [text for text in texts if text and text.strip()]


def composed_paths(settings: DatasetSettings, table: pl.DataFrame) -> set[str]:
    """Return the `composed` paths of the table's rows."""
    normalize = path_normalizer(settings)
    return {composed(normalize(path)) for path in table[settings.path_column] if path}


def selected_rows(settings: DatasetSettings, table: pl.DataFrame) -> pl.DataFrame:
    """Return the rows for which `filters.where` is true; without it all rows.

    Raises:
        DatasetError: `filters.where` is not a valid SQL expression over the manifest's columns.
    """
    where = settings.filters.where
    if where is None:
        return table
    try:
        return table.filter(rows_where(where, table, path_column=settings.path_column))
    except ValueError as err:
        columns = ", ".join(f"{name} ({kind})" for name, kind in table.schema.items())
        raise DatasetError(
            f"filters.where {where!r} cannot be applied: {err}",
            where=str(settings.path),
            fix=f"write a boolean SQL expression over the manifest's columns: {columns}",
        ) from err


def paired_by_path(settings: DatasetSettings, column: str, *, max_bytes: int) -> dict[str, str]:
    """Return the path of each image's mask or reference, as `column` names it; the first row counts.

    The images' paths are `composed`. Rows that `filters.where` excludes do not count.
    """
    table = selected_rows(settings, read_manifest(settings, max_bytes=max_bytes))
    normalize = path_normalizer(settings)
    paired: dict[str, str] = {}
    for path, other in table.select(settings.path_column, column).rows():
        if path and other:
            paired.setdefault(composed(normalize(path)), normalize(str(other)))
    return paired


def focus_by_path(settings: DatasetSettings, table: pl.DataFrame) -> dict[str, tuple[float, float]]:
    """Return the focus point of each `composed` path: the point to keep in view, as fractions of its sides.

    A missing value is 0.5. If a path has several rows, the first one counts.

    Raises:
        DatasetError: A focus column does not hold numbers.
    """
    assert settings.focus_columns is not None
    rows = table.select(settings.path_column)
    for name in settings.focus_columns:
        try:
            rows = rows.hstack([table[name].cast(pl.Float64).fill_null(0.5)])
        except pl.exceptions.PolarsError as err:
            raise DatasetError(
                f"the column {name!r} must hold numbers, got {table[name].dtype}: {err}",
                where=str(settings.path),
                fix="set datasets[].focus_columns to columns of numbers from 0 to 1",
            ) from err

    normalize = path_normalizer(settings)
    focuses: dict[str, tuple[float, float]] = {}
    for path, x, y in rows.rows():
        if path:
            focuses.setdefault(composed(normalize(path)), (x, y))
    return focuses


def focus_of(focuses: Mapping[str, tuple[float, float]], path: str) -> tuple[float, float]:
    """Return one image's focus point (x, y); the centre if `focuses` does not have it.

    Raises:
        ImageError: The point is outside the image.
    """
    x, y = focuses.get(composed(path), CENTRE)
    if not (0.0 <= x <= 1.0 and 0.0 <= y <= 1.0):
        raise ImageError(
            "focus_outside",
            f"the focus point ({x:g}, {y:g}) is outside the image",
            fix="write x and y as fractions of width and height from 0 to 1, or leave them empty",
            where=path,
        )
    return x, y
