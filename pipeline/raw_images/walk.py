"""Walk one dataset, a folder or a manifest, and give each of its image files a sample id."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.images.formats import ImageError
from pipeline.log import Log
from pipeline.raw_images.folder import (
    FoundFile,
    Problem,
    WalkResult,
    require_listable,
    sidecar_path,
    walk_local,
    walk_remote,
)
from pipeline.raw_images.manifest import read_manifest, walk_manifest
from pipeline.raw_images.scan_index import STAT
from pipeline.raw_images.shard_list import list_shards
from pipeline.raw_images.sources import source_of
from pipeline.reporting.progress import progress
from pipeline.reporting.rejections import printable, rejection
from pipeline.storage.addresses import Address, Url
from pipeline.storage.regular_files import MAX_FILE_BYTES
from pipeline.storage.source import DATASET_KEY, LocalSource, Source

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings

STAGE = "raw_images"


@dataclass(frozen=True)
class WalkedDataset:
    """The files of one dataset.

    Attributes:
        walk: Counts and paths of the files that are not images.
        images: Columns sample_id, dataset, path and `STAT`; sorted by sample_id.
        rejected: Rows of the table of rejected samples: files and folders that could not be read.
        orphan_captions: Paths of caption files without an image, not even a rejected one.
    """

    settings: DatasetSettings
    source: Source
    walk: WalkResult
    images: pl.DataFrame
    rejected: list[dict[str, Any]]
    orphan_captions: list[str]


def require_readable(
    settings: DatasetSettings, *, packed: Address | None = None, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Raise DatasetError unless a dataset's manifest can be read, with all its columns, and all its folders.

    `packed` is the address of its shards, which are only listed. Manifests, shards and folders at an address
    are not checked.
    """
    if packed is not None and not isinstance(packed, Url):
        list_shards(LocalSource(packed.parent), packed)
    if packed is None and settings.is_manifest and not isinstance(settings.path, Url):
        read_manifest(settings, max_bytes=max_file_bytes)
    require_folders(settings, packed=packed)


def require_folders(settings: DatasetSettings, *, packed: Address | None = None) -> None:
    """Raise DatasetError unless the local folders of images, shards and side inputs can be listed."""
    folders = settings.folders
    if packed is not None:
        # The folder of the unpacked images may not exist yet.
        unpacked = settings.root
        folders = {key: folder for key, folder in folders.items() if folder != unpacked}
        folders[DATASET_KEY] = packed.parent
    for key, folder in folders.items():
        if not isinstance(folder, Url):
            require_listable(folder, key)


def walk_dataset(
    settings: DatasetSettings, log: Log, *, max_file_bytes: int = MAX_FILE_BYTES
) -> WalkedDataset:
    """List the files of one dataset; files above `max_file_bytes` are listed too, but not opened.

    Raises:
        DatasetError: The dataset cannot be listed.
    """
    caption_suffixes = settings.captions.suffixes if settings.captions.reads_files else ()
    source = source_of(settings, max_file_bytes=max_file_bytes)
    walk = WalkResult()
    with progress(lambda: len(walk.images), None, f"images found in {settings.name}", log=log):
        if settings.is_manifest:
            walk_manifest(settings, source, result=walk)
        elif isinstance(source, LocalSource):
            walk_local(Path(settings.path), caption_suffixes, result=walk, key=source.key)
            source.links_out = frozenset(walk.links_out)
        else:
            walk_remote(source, caption_suffixes, result=walk)

    if settings.excluded:
        _remove_excluded(walk, excluded_by(settings.excluded))

    images, name_problems = _with_sample_ids(settings.name, walk.images)
    problems = walk.problems + name_problems
    return WalkedDataset(
        settings=settings,
        source=source,
        walk=walk,
        images=images,
        rejected=[_rejected_row(settings.name, problem) for problem in problems],
        orphan_captions=_orphan_captions(walk.captions, images, problems, caption_suffixes),
    )


def _remove_excluded(walk: WalkResult, is_excluded: Callable[[str], bool]) -> None:
    num_found = len(walk.images) + len(walk.problems)
    walk.images = [file for file in walk.images if not is_excluded(file.path)]
    walk.problems = [problem for problem in walk.problems if not is_excluded(problem.path)]
    walk.captions = [path for path in walk.captions if not is_excluded(path)]
    walk.foreign_caches = [path for path in walk.foreign_caches if not is_excluded(path)]
    walk.deleted_or_cached = [path for path in walk.deleted_or_cached if not is_excluded(path)]
    walk.links_out = [path for path in walk.links_out if not is_excluded(path)]

    # Images and unreadable files count, because they would belong to the dataset.
    walk.passed_over["excluded"] += num_found - len(walk.images) - len(walk.problems)


def _with_sample_ids(dataset: str, files: list[FoundFile]) -> tuple[pl.DataFrame, list[Problem]]:
    """Return the files with their sample ids, and a problem for each file that cannot have one."""
    # One text of all names, because a call for each takes a tenth of an unchanged scan.
    names = "\n".join(file.path for file in files)
    undecodable = (
        [file for file in files if printable(file.path) != file.path] if printable(names) != names else []
    )
    valid = [file for file in files if printable(file.path) == file.path] if undecodable else files
    problems = [
        Problem(
            file.path,
            "name_undecodable",
            f"the file name is not UTF-8: {os.fsencode(file.path)!r}",
            "rename the file or its folder",
        )
        for file in undecodable
    ]

    schema = {"path": pl.String, **dict.fromkeys(STAT, pl.Int64), "composed": pl.String}
    values = [list(map(itemgetter(index), valid)) for index in range(1 + len(STAT))]
    paths = values[0]
    composed = paths if names.isascii() else [unicodedata.normalize("NFC", path) for path in paths]
    table = pl.DataFrame([*values, composed], schema=schema, orient="col").with_columns(
        dataset=pl.lit(dataset), sample_id=pl.lit(f"{dataset}/") + pl.col("composed")
    )

    columns = ("sample_id", "dataset", "path", *STAT)
    if table["sample_id"].n_unique() == len(table):
        return table.sort("sample_id").select(columns), problems

    # If two names differ only in Unicode form, the composed one wins: its path is the sample id.
    table = table.sort("sample_id", pl.col("path") != pl.col("composed"), "path")
    collisions = (
        table.filter(pl.col("sample_id").is_duplicated())
        .select("path", kept=pl.col("path").first().over("sample_id"))
        .filter(pl.col("path") != pl.col("kept"))
    )
    problems += [
        Problem(
            path,
            "name_collision",
            f"the name {path!a} differs only in Unicode form from {kept!a}, which is kept",
            "rename one of the two files",
        )
        for path, kept in collisions.rows()
    ]
    images = table.unique("sample_id", keep="first", maintain_order=True)
    return images.select(columns), problems


def _rejected_row(dataset: str, problem: Problem) -> dict[str, Any]:
    # The id uses the name as spelled, because the NFC form may be the id of a kept file.
    path = printable(problem.path)

    # An escaped name gets a digest, because another file may be named like the escaped text.
    if path != problem.path:
        path = f"{path} ({hashlib.sha256(os.fsencode(problem.path)).hexdigest()[:8]})"
    error = ImageError(problem.reason, problem.detail, fix=problem.fix)
    return {
        "sample_id": f"{dataset}/{path}",
        "dataset": dataset,
        "path": path,
        **rejection(error, STAGE, None),
    }


def _orphan_captions(
    captions: list[str], images: pl.DataFrame, problems: list[Problem], caption_suffixes: tuple[str, ...]
) -> list[str]:
    if not captions:
        return []

    # Names that are not UTF-8 are among the problems, since a table cannot hold them.
    stems = images.select(without_suffix(pl.col("path"))).to_series().to_list()
    stems += [sidecar_path(problem.path, "") for problem in problems]
    expected = {stem + suffix for stem in stems for suffix in caption_suffixes}
    return [path for path in captions if path not in expected]


def without_suffix(paths: pl.Expr) -> pl.Expr:
    """Return the column of paths as `sidecar_path` with the suffix "" does, without a call for each path."""
    # The character before the dot makes sure that the name does not start with the dot.
    return paths.str.replace(r"([^/])\.[^./]*$", "${1}")


def excluded_by(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that is True for paths below a dataset's folder that one of the patterns matches.

    A pattern without a slash matches the name of a file or folder at any depth, and a pattern with a slash
    matches a path from the dataset's folder. A matched folder excludes everything below it. `*` matches any
    characters except a slash, and `?` matches one. Case counts, and the Unicode form does not.
    """
    alternatives = "|".join(_expression(unicodedata.normalize("NFC", pattern)) for pattern in patterns)
    if not alternatives:
        return lambda path: False
    match = re.compile(f"(?:{alternatives})(?:/|$)", re.DOTALL).match
    return lambda path: match(unicodedata.normalize("NFC", path)) is not None


def _expression(pattern: str) -> str:
    is_anchored = "/" in pattern.rstrip("/")
    first, *others = ["[^/]".join(map(re.escape, part.split("?"))) for part in pattern.strip("/").split("*")]

    # Each part between two stars is taken only where it fits first (an atomic group), because no later place
    # lets more match. Trying all places would take hours for a pattern of many stars.
    last = f"[^/]*{others.pop()}" if others else ""
    body = first + "".join(f"(?>[^/]*?{part})" for part in others) + last
    return body if is_anchored else f"(?:.*/)?{body}"
