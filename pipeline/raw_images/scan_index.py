"""What earlier runs found out: verdicts about pixels, captions by the stat of their files, rejected files.

They are indexes beside the tables, each replaced whole. One that is missing, damaged or of an older form is
empty: then everything is looked at anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.reporting.progress import progress
from pipeline.storage.atomic import write_atomically
from pipeline.storage.tables import REJECTED, only, write_rows
from pipeline.versions import CAPTIONS_VERSION

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.recipe import DatasetSettings
    from pipeline.reporting.reports import Log
    from pipeline.storage.source import Source
    from pipeline.storage.tables import Tables

PIXELS: dict[str, Any] = {
    "content_hash": pl.String,
    "decoder": pl.String,
    "reason": pl.String,
    "detail": pl.String,
    "fix": pl.String,
    "perceptual_hash": pl.UInt64,
}
"""One row a content: `reason`, `detail` and `fix` are null where it decodes to the last pixel, or say why it
does not; `perceptual_hash` is as `duplicates.perceptual_hash` has it."""

SIDECAR_STAT = ("caption_bytes", "caption_mtime_ns", "caption_ctime_ns", "caption_inode")

CAPTIONS: dict[str, Any] = {
    "sample_id": pl.String,
    "rule": pl.String,
    "caption": pl.String,
    "more_captions": pl.String,
    "caption_from": pl.String,
    "caption_read_ns": pl.Int64,
    **dict.fromkeys(SIDECAR_STAT, pl.Int64),
}
"""One row a sample whose caption was found: what `caption_rule` was, the columns of validated_dataset, when
the caption was read, and the stat of its file before that; -1 where there is no file."""

REFUSED: dict[str, Any] = {
    **REJECTED,
    **dict.fromkeys(("file_bytes", "mtime_ns", "ctime_ns", "inode", "scanned_ns"), pl.Int64),
    "decoder": pl.String,
    "max_px": pl.Int64,
}
"""One row a file that the scan rejected: as rejected, its stat, when it was read, by which decoder and with
which limit. Nulls where it could not be read."""

SIDECAR = "sidecar:"
"""Beginning of a sidecar's `caption_from`; its path follows."""

_REFUSED_FILE = "refused.parquet"

_AT_ONCE = 2_000
"""Files of a folder of this machine that are looked at before the progress moves."""


class Known:
    """The two indexes of one recipe, below `output_dir/tables/known`."""

    def __init__(self, tables: Tables) -> None:
        """Read both."""
        self._folder = tables.folder / "known"
        self._pixels = _read(self._folder / "pixels.parquet", PIXELS)
        self.captions = _read(self._folder / "captions.parquet", CAPTIONS)
        """As `CAPTIONS`."""

    def pixels(self, decoders: Iterator[str]) -> pl.DataFrame:
        """The verdicts of these decoders."""
        return only(self._pixels, made_by(self._pixels["decoder"], decoders))

    def write(self, pixels: pl.DataFrame, captions: pl.DataFrame) -> None:
        """Replace those of which anything has changed."""
        kept = (("pixels", pixels, self._pixels), ("captions", captions, self.captions))
        for name, rows, before in kept:
            if not rows.equals(before):
                write_atomically(self._folder / f"{name}.parquet", partial(write_rows, rows))


def made_by(recorded: pl.Series, decoders: Iterator[str]) -> pl.Series:
    """Of each decoder whether it is one of some: no more of these are asked for than it takes to say."""
    first = recorded == next(decoders)
    return first if first.all() else first | recorded.is_in(list(decoders))


def read_refused(tables: Tables) -> pl.DataFrame:
    """The files that the last scan rejected for what they hold, as `REFUSED`."""
    return _read(tables.folder / "known" / _REFUSED_FILE, REFUSED)


def write_refused(tables: Tables, rows: pl.DataFrame) -> None:
    """Replace what `read_refused` gives, if anything has changed."""
    ordered = rows.sort("sample_id")
    if not ordered.equals(read_refused(tables)):
        write_atomically(tables.folder / "known" / _REFUSED_FILE, partial(write_rows, ordered))


def caption_rule(settings: DatasetSettings) -> str | None:
    """What decides a caption beside its file; None where more than one file and these settings do."""
    if settings.captions.from_ == "column":
        return None
    said = f"{CAPTIONS_VERSION}\0{settings.root}\0{settings.captions.model_dump_json()}"
    return hashlib.sha256(said.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def stats_in(
    sources: Mapping[str, Source], rows: pl.DataFrame, name: str, *, log: Log, doing: str
) -> Iterator[tuple[pl.DataFrame, npt.NDArray[np.int64], Source]]:
    """Some rows at a time with the stat of one file of each, int64 (N, 4) as `Source.stats`, and its source.

    Rows of one source follow one another; those without a file are left out.

    Args:
        sources: By dataset.
        rows: With `dataset`; they come with `row`, their place.
        name: The column of the file's path; a null is no file.
        log: Told how far it is.
        doing: What is counted, such as "files compared".
    """
    has_file = rows[name].is_not_null()
    done = 0
    with progress(lambda: done, int(has_file.sum()), doing, log=log):
        for dataset, source in sources.items():
            places = ((rows["dataset"] == dataset) & has_file).arg_true()
            size = len(places) if source.threads else _AT_ONCE  # what a server lists it lists at once
            for start in range(0, len(places), max(1, size)):
                some = places[start : start + size]
                part = rows[some].with_columns(row=some)
                yield part, source.stats(part[name].to_list()), source
                done += len(part)


def same_files(sources: Mapping[str, Source], rows: pl.DataFrame, *, log: Log) -> pl.Series:
    """For each row with columns of raw_images: whether its file is still the one that the scan saw."""
    same = np.zeros(len(rows), dtype=np.bool_)
    stat = ["file_bytes", "mtime_ns", "ctime_ns", "inode"]
    scanned = rows.select("dataset", "path", *stat)
    for part, now, source in stats_in(sources, scanned, "path", log=log, doing="files compared"):
        columns = list(source.compared_columns)
        then = part.select(stat).to_numpy()
        same[part["row"].to_numpy()] = (then[:, columns] == now[:, columns]).all(axis=1)
    return pl.Series(same, dtype=pl.Boolean)


def same_sidecars(
    sources: Mapping[str, Source], rows: pl.DataFrame, granularity_ns: int, *, log: Log
) -> pl.Series:
    """For each row with the columns of `CAPTIONS`: whether its caption's file is the one that was read.

    A file that had changed within the clock's granularity of being read is not trusted, as in git's index.

    Args:
        sources: By dataset.
        rows: Some samples.
        granularity_ns: Of the coarsest clock.
        log: Told how far it is.
    """
    of_file = pl.when(pl.col("caption_from").str.starts_with(SIDECAR))
    path = of_file.then(pl.col("caption_from").str.strip_prefix(SIDECAR)).otherwise(None)
    named = rows.select("dataset", "caption_read_ns", *SIDECAR_STAT, sidecar=path)
    same = named["sidecar"].is_null().to_numpy().copy()
    for part, now, _ in stats_in(sources, named, "sidecar", log=log, doing="captions compared"):
        settled = part["caption_ctime_ns"] + granularity_ns < part["caption_read_ns"]
        equal = (part.select(SIDECAR_STAT).to_numpy() == now).all(axis=1)
        same[part["row"].to_numpy()] = equal & settled.to_numpy()
    return pl.Series(same, dtype=pl.Boolean)


def _read(path: Path, schema: dict[str, Any]) -> pl.DataFrame:
    try:
        rows = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError):
        return pl.DataFrame(schema=schema)
    return rows if dict(rows.schema) == schema else pl.DataFrame(schema=schema)
