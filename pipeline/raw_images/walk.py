"""One dataset, walked: its images under their sample ids, and what can be no sample."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.images.formats import ImageError
from pipeline.raw_images.funnel import printable, refusal
from pipeline.raw_images.local_folder import FoundFiles, Problem, Walk, require_listable, walk
from pipeline.raw_images.manifest import read_listing, walk_listing
from pipeline.raw_images.path_list import Paths
from pipeline.raw_images.sidecars import sidecar_path
from pipeline.reporting.progress import progress
from pipeline.reporting.reports import Log
from pipeline.storage.addresses import Url
from pipeline.storage.source import LocalSource, Source, source_at
from pipeline.storage.tables import in_order

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings

STAGE = "raw_images"

STAT = ["file_bytes", "mtime_ns", "ctime_ns", "inode"]
"""Columns of a file's stat, in the order of `source.Stat`."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Walked:
    """One dataset's files as walked.

    Attributes:
        settings: Of the dataset.
        source: Its files.
        walk: What was met, without its images.
        images: sample_id, dataset, path and `STAT`; sorted by path, or by sample_id where they differ.
        rejected: Rows of the table of rejected samples: what could not be looked at.
        lonely: Caption files that belong to no image, not even to a rejected one.
    """

    settings: DatasetSettings
    source: Source
    walk: Walk
    images: pl.DataFrame
    rejected: list[Row]
    lonely: list[str]


def require_there(settings: DatasetSettings) -> None:
    """Nothing, where the dataset's folder or listing is on this machine and can be read, or is elsewhere.

    Raises:
        DatasetError: It is missing or cannot be read, or the listing lacks a column that the recipe names.
    """
    if isinstance(settings.path, Url):
        return
    if settings.is_manifest:
        read_listing(settings)
    else:
        require_listable(settings.path)


def walk_dataset(settings: DatasetSettings, log: Log) -> Walked:
    """What there is of one dataset.

    Raises:
        DatasetError: It cannot be listed.
    """
    suffix = settings.captions.suffix if settings.captions.from_ == "sidecar" else None
    found = Walk()
    source = source_at(settings.root)
    with progress(lambda: len(found.images), None, f"images found in {settings.name}", log=log):
        if settings.is_manifest:
            walk_listing(settings, source, found=found)
        elif isinstance(source, LocalSource):
            walk(Path(settings.path), suffix, found=found)
        else:
            from pipeline.raw_images.remote_folder import walk_remote  # fsspec, which few need

            walk_remote(source, suffix, found=found)
    images, problems = _named(settings.name, found.images)
    problems += found.problems
    lonely = _lonely_captions(settings, found, images, problems)
    found.images, found.captions = FoundFiles(), Paths()
    rejected = [_rejected(settings.name, problem) for problem in problems]
    return Walked(settings, source, found, images, rejected, lonely)


def _named(dataset: str, files: FoundFiles) -> tuple[pl.DataFrame, list[Problem]]:
    """The files with their sample ids, and those that can have none."""
    if not files.paths.are_ascii:
        return _named_in_any_script(dataset, list(files.paths), files.stats())
    named = _columns(dataset, files.paths.series(), files.stats())
    named = in_order(named, ["path"]).with_columns(sample_id=pl.lit(f"{dataset}/") + pl.col("path"))
    return named.select("sample_id", "dataset", "path", *STAT), []


def _columns(dataset: str, paths: pl.Series, stats: npt.NDArray[np.int64]) -> pl.DataFrame:
    numbers = {name: pl.Series(stats[:, place], dtype=pl.Int64) for place, name in enumerate(STAT)}
    return pl.DataFrame({"path": paths, **numbers}).with_columns(dataset=pl.lit(dataset))


def _named_in_any_script(
    dataset: str, paths: list[str], stats: npt.NDArray[np.int64]
) -> tuple[pl.DataFrame, list[Problem]]:
    """As `_named`, of names that may be no text, or one name in two Unicode forms."""
    are_text = [_is_text(path) for path in paths]
    problems = [_undecodable_name(path) for path, is_text in zip(paths, are_text, strict=True) if not is_text]
    texts = [path for path, is_text in zip(paths, are_text, strict=True) if is_text]
    named = _columns(dataset, pl.Series(texts, dtype=pl.String), stats[np.array(are_text, dtype=np.bool_)])
    ids = [f"{dataset}/{unicodedata.normalize('NFC', path)}" for path in texts]
    composed = [unicodedata.is_normalized("NFC", path) for path in texts]
    named = named.with_columns(sample_id=pl.Series(ids, dtype=pl.String), composed=pl.Series(composed))
    # Of two Unicode forms of one name the composed is kept, so that the other's spelling is no sample's id.
    named = named.sort("sample_id", "composed", "path", descending=[False, True, False])
    kept = named.select("path", kept=pl.col("path").first().over("sample_id"))
    twins = kept.filter(pl.col("path") != pl.col("kept"))
    problems += [_same_name(path, other) for path, other in twins.rows()]
    first = named.unique("sample_id", keep="first", maintain_order=True)
    return first.select("sample_id", "dataset", "path", *STAT), problems


def _is_text(path: str) -> bool:
    """False for a name whose bytes are no UTF-8; Python keeps them as lone surrogates."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _undecodable_name(path: str) -> Problem:
    detail = f"its name is not UTF-8: {os.fsencode(path)!r}"
    return Problem(path, "name_undecodable", detail, "rename the file or its folder")


def _same_name(path: str, kept: str) -> Problem:
    detail = f"its name differs only in Unicode form from {kept!a}, which is kept (this one is {path!a})"
    return Problem(path, "name_collision", detail, "rename one of the two files")


def _rejected(dataset: str, problem: Problem) -> Row:
    """A row of the table of rejected samples, its path escaped where it is no UTF-8.

    The id is the name as spelled: one in another Unicode form would be the id of the file that is kept. An
    escaped name carries a digest, because another file may really be named as the escape reads.
    """
    path = printable(problem.path)
    if not _is_text(problem.path):
        path = f"{path} ({hashlib.sha256(os.fsencode(problem.path)).hexdigest()[:8]})"
    error = ImageError(problem.reason, problem.detail, fix=problem.fix)
    return {"sample_id": f"{dataset}/{path}", "dataset": dataset, "path": path} | refusal(error, STAGE, None)


def _lonely_captions(
    settings: DatasetSettings, found: Walk, images: pl.DataFrame, problems: Sequence[Problem]
) -> list[str]:
    """Caption files that belong to no image, not even to a rejected one."""
    if not len(found.captions):
        return []
    suffix = settings.captions.suffix
    of_problems = {sidecar_path(problem.path, suffix) for problem in problems}
    if not found.captions.are_ascii:
        names = found.captions
        captions = pl.Series([name for name in names if _is_text(name)], dtype=pl.String)
        apart = {name for name in names if not _is_text(name)}
    else:
        captions, apart = found.captions.series(), set[str]()
    ending = r"([^/])\.[^./]*$"  # the last suffix, of a name that is more than a suffix
    captioned = images.select(path=pl.col("path").str.replace(ending, "$1") + suffix)
    alone = captions.alias("path").to_frame().join(captioned, on="path", how="anti")
    return list(apart.union(alone["path"]) - of_problems)
