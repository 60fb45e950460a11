"""What earlier validations found out: verdicts about pixels, and captions by the stat of their files.

Both are indexes beside the tables, each replaced whole. One that is missing, damaged or of an older form is
empty: then everything is looked at anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.atomic import write_through
from pipeline.progress import progress

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.recipe import DatasetSettings
    from pipeline.reports import Log
    from pipeline.source import Source
    from pipeline.tables import Tables

CAPTIONS_VERSION = 1
"""Of how a caption file becomes captions; another version reads every one again."""

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

SIDECAR = "sidecar:"
"""Beginning of a sidecar's `caption_from`; its path follows."""

_AT_ONCE = 10_000
"""Files of a folder of this machine that are looked at before the progress moves: a tenth of a second."""


class Known:
    """The two indexes of one recipe, below `output_dir/tables/known`."""

    def __init__(self, tables: Tables) -> None:
        """Read both."""
        self._folder = tables.folder / "known"
        self._pixels = _read(self._folder / "pixels.parquet", PIXELS)
        self.captions = _read(self._folder / "captions.parquet", CAPTIONS)
        """As `CAPTIONS`."""

    def pixels(self, decoder: str) -> pl.DataFrame:
        """The verdicts of this decoder."""
        return self._pixels.filter(pl.col("decoder") == decoder)

    def write(self, pixels: pl.DataFrame, captions: pl.DataFrame) -> None:
        """Replace those of which anything has changed; rows are sorted by their first column."""
        kept = (("pixels", pixels, self._pixels), ("captions", captions, self.captions))
        for name, rows, before in kept:
            ordered = rows.sort(rows.columns[0])
            if not ordered.equals(before):
                write_through(self._folder / f"{name}.parquet", ordered.write_parquet)


def caption_rule(settings: DatasetSettings) -> str | None:
    """What decides a caption beside its file; None where more than one file and these settings do."""
    if settings.captions.from_ == "column":
        return None
    said = f"{CAPTIONS_VERSION}\0{settings.root}\0{settings.captions.model_dump_json()}"
    return hashlib.sha256(said.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def stats_in(
    sources: Mapping[str, Source], rows: pl.DataFrame, name: str, *, log: Log, doing: str
) -> npt.NDArray[np.int64]:
    """The stat of one file of each row, int64 (N, 4), as `Source.stats`.

    Args:
        sources: By dataset.
        rows: With `dataset`.
        name: The column of its path; a null is no file.
        log: Told how far it is.
        doing: What is counted, such as "files compared".
    """
    found = np.full((len(rows), 4), -1, dtype=np.int64)
    wanted = rows.select("dataset", path=name).with_row_index("row").filter(pl.col("path").is_not_null())
    done = 0
    with progress(lambda: done, len(wanted), doing, log=log):
        for dataset, source in sources.items():
            of_dataset = wanted.filter(pl.col("dataset") == dataset)
            size = len(of_dataset) if source.threads else _AT_ONCE  # what a server lists it lists at once
            for part in of_dataset.iter_slices(max(1, size)):
                found[part["row"].to_numpy()] = source.stats(part["path"].to_list())
                done += len(part)
    return found


def same_sidecars(rows: pl.DataFrame, now: npt.NDArray[np.int64], granularity_ns: int) -> pl.Series:
    """For each row with the columns of `CAPTIONS`: whether its caption's file is the one that was read.

    A file that had changed within the clock's granularity of being read is not trusted, as in git's index.

    Args:
        rows: Some samples.
        now: Of their captions' files, as `stats_in`.
        granularity_ns: Of the coarsest clock.
    """
    settled = pl.col("caption_ctime_ns") + granularity_ns < pl.col("caption_read_ns")
    stats = pl.DataFrame(now, schema=[f"now_{name}" for name in SIDECAR_STAT])
    same = pl.all_horizontal(settled, *(pl.col(name) == pl.col(f"now_{name}") for name in SIDECAR_STAT))
    of_file = pl.col("caption_from").str.starts_with(SIDECAR)
    return rows.hstack(stats).select(same=~of_file | same).to_series()


def _read(path: Path, schema: dict[str, Any]) -> pl.DataFrame:
    try:
        rows = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError):
        return pl.DataFrame(schema=schema)
    return rows if dict(rows.schema) == schema else pl.DataFrame(schema=schema)
