"""Remember what earlier runs learned: decode results, captions, side inputs and rejected files.

The indexes are Parquet files below `output_dir/tables/known`, replaced atomically. A file is trusted while
its stat is unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.images.pixel_values import PIXEL_VALUES
from pipeline.reporting.progress import progress
from pipeline.storage.atomic import write_atomically
from pipeline.storage.hub_revision import without_commit
from pipeline.storage.tables import REJECTED, read_rows, write_rows
from pipeline.versions import CAPTIONS_VERSION, REPLACE_VERSION

if TYPE_CHECKING:
    from pipeline.log import Log
    from pipeline.recipe import DatasetSettings
    from pipeline.storage.source import Source
    from pipeline.storage.tables import Tables

STAT = ("file_bytes", "mtime_ns", "ctime_ns", "inode")
"""Columns of a file's stat, in the order of `source.Stat`."""

# A file with other columns is discarded, so a new column decodes every image of every dataset again.
DECODED: dict[str, Any] = {
    "content_hash": pl.String,
    "decoder": pl.String,
    "reason": pl.String,
    "detail": pl.String,
    "fix": pl.String,
    "decoding": pl.String,
    **{name: value.dtype for name, value in PIXEL_VALUES.items()},
}
"""Columns of pixels.parquet, one row per content. `reason`, `detail` and `fix` explain a failed decode
and are null otherwise; its decoding rules and the values of its pixels follow."""

SIDECAR_STAT = ("caption_bytes", "caption_mtime_ns", "caption_ctime_ns", "caption_inode")

CAPTIONS: dict[str, Any] = {
    "sample_id": pl.String,
    "rule": pl.String,
    "caption": pl.String,
    "more_captions": pl.String,
    "caption_from": pl.String,
    "differing_captions": pl.List(pl.String),
    "caption_read_ns": pl.Int64,
    **dict.fromkeys(SIDECAR_STAT, pl.List(pl.Int64)),
}
"""Columns of captions.parquet, one row per sample with a caption: the `caption_rule` it was read by, columns
of validated_dataset, the caption files with another text, the time of reading, and the stats of all listed
caption files before that, in the recipe's order; -1 for a missing file, null for captions without files."""

REJECTED_FILES: dict[str, Any] = {
    **REJECTED,
    **dict.fromkeys((*STAT, "scanned_ns"), pl.Int64),
    "decoder": pl.String,
    "max_px": pl.Int64,
}
"""Columns of refused.parquet, one row per file that the scan rejected: the rejection, the file's stat, the
time of reading, the decoder and its pixel limit. All but the rejection may be null."""

SIDE_INPUT: dict[str, Any] = {
    **dict.fromkeys(("root", "source", "path"), pl.String),
    **dict.fromkeys((*STAT, "read_ns"), pl.Int64),
    "hash": pl.String,
    **dict.fromkeys(("height", "width"), pl.Int32),
}
"""Columns of <side inputs>.parquet, one row per usable file: its folder, how it is read, its path, its stat
when it was listed, the time of reading, the hash of its bytes, and its size. A side input may add columns."""

SIDECAR = "sidecar:"
"""Prefix of `caption_from` for a sidecar file; its path follows."""

# Another name would discard what existing output folders remember.
_REJECTED_FILE = "refused.parquet"

BATCH_FILES = 2_000
"""Number of local files between two progress updates."""


class ScanIndex:
    """The decode results and captions that one recipe's earlier runs stored.

    Attributes:
        decoded: Table with the columns `DECODED`.
        captions: Table with the columns `CAPTIONS`.
    """

    def __init__(self, tables: Tables) -> None:
        """Read all indexes."""
        self._tables = tables
        self._folder = _index_folder(tables)
        self.decoded = _read(tables, "pixels.parquet", DECODED)
        self.captions = _read(tables, "captions.parquet", CAPTIONS)
        self._side_inputs: dict[str, pl.DataFrame] = {}

    def side_input(self, name: str, columns: Mapping[str, Any]) -> pl.DataFrame:
        """Return what earlier runs learned of the files of a side input, such as "masks"."""
        if name not in self._side_inputs:
            self._side_inputs[name] = _read(self._tables, f"{name}.parquet", columns)
        return self._side_inputs[name]

    def write(
        self, decoded: pl.DataFrame, captions: pl.DataFrame, side_inputs: Mapping[str, pl.DataFrame]
    ) -> None:
        """Replace the indexes that have changed."""
        if not _are_equal(decoded, self.decoded):
            write_atomically(self._folder / "pixels.parquet", partial(write_rows, decoded))
        if not _are_equal(captions, self.captions):
            write_atomically(self._folder / "captions.parquet", partial(write_rows, captions))
        for name, files in side_inputs.items():
            if not files.equals(self.side_input(name, files.schema)):
                write_atomically(self._folder / f"{name}.parquet", partial(write_rows, files))


def read_rejected_files(tables: Tables) -> pl.DataFrame:
    """Return the files that the last scan rejected for their content, with the columns `REJECTED_FILES`."""
    return _read(tables, _REJECTED_FILE, REJECTED_FILES)


def write_rejected_files(tables: Tables, rows: pl.DataFrame) -> None:
    """Replace the index of rejected files if it has changed."""
    rows = rows.sort("sample_id")
    if not rows.equals(read_rejected_files(tables)):
        write_atomically(_index_folder(tables) / _REJECTED_FILE, partial(write_rows, rows))


def _index_folder(tables: Tables) -> Path:
    return tables.folder / "known"


def _read(tables: Tables, name: str, schema: Mapping[str, Any]) -> pl.DataFrame:
    # A missing, damaged or older index counts as empty: then every file is read again.
    path = _index_folder(tables) / name
    if not path.is_file():
        return pl.DataFrame(schema=schema)
    try:
        rows = read_rows(path)
        if dict(rows.schema) == dict(schema):
            return rows
        what = "the columns of the table are not the ones of this release"
    except (OSError, pl.exceptions.PolarsError) as err:
        what = f"the table cannot be read: {err}"
    tables.log_unused(what, path)
    return pl.DataFrame(schema=schema)


def caption_rule(settings: DatasetSettings) -> str | None:
    """Return a hash of the settings that decide a caption together with its file; None for a manifest's."""
    # Captions of a manifest, and of a model from its table, are read on every run.
    if settings.captions.from_ in ("column", "model"):
        return None
    links = "any links" if settings.follow_links else "links inside"
    # Captions that were read before these keys existed stay valid.
    unset = {key for key in ("replace", "class_words", "drop_tags") if not getattr(settings.captions, key)}
    captions = settings.captions.model_dump_json(exclude=unset)
    # A new commit changes the version of each file that it changes, and no other file is read again.
    rule = f"{CAPTIONS_VERSION}\0{links}\0{without_commit(settings.root)}\0{captions}"
    if settings.captions.replace:
        rule += f"\0replace {REPLACE_VERSION}"
    return hashlib.sha256(rule.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def read_stats(
    sources: Mapping[str, Source], files: pl.DataFrame, *, log: Log, doing: str
) -> dict[str, pl.DataFrame]:
    """Return for each dataset a table with sample_id and the current `STAT`; -1 for missing files.

    `files` has the columns sample_id, dataset and path; rows with a null path are skipped. `doing` labels the
    progress, such as "files compared".
    """
    files = files.drop_nulls("path")
    num_done = 0
    stats: dict[str, pl.DataFrame] = {}
    with progress(lambda: num_done, len(files), doing, log=log):
        for dataset, source in sources.items():
            in_dataset = files.filter(pl.col("dataset") == dataset)
            # A remote source lists each folder once per call, so it gets all paths together.
            batch_size = max(1, len(in_dataset)) if source.threads else BATCH_FILES
            parts = [pl.DataFrame(schema={"sample_id": pl.String, **dict.fromkeys(STAT, pl.Int64)})]
            for batch in in_dataset.iter_slices(batch_size):
                now = pl.DataFrame(source.stats(batch["path"].to_list()), schema=list(STAT))
                parts.append(batch.select("sample_id").hstack(now))
                num_done += len(batch)
            stats[dataset] = pl.concat(parts)
    return stats


def unchanged_files(sources: Mapping[str, Source], rows: pl.DataFrame, *, log: Log) -> pl.DataFrame:
    """Return the sample_id of each row with an unchanged image file since the scan.

    `rows` has the columns sample_id, dataset, path and `STAT`.
    """
    files = rows.select("sample_id", "dataset", "path")
    stats = read_stats(sources, files, log=log, doing="files compared")
    unchanged: list[pl.DataFrame] = []
    for dataset, now in stats.items():
        compared = [STAT[column] for column in sources[dataset].compared_columns]
        unchanged.append(rows.join(now, on=["sample_id", *compared], how="semi").select("sample_id"))
    return pl.concat(unchanged)


def sidecar_stats(
    sources: Mapping[str, Source], files: pl.DataFrame, *, log: Log, doing: str
) -> pl.DataFrame:
    """Return a table with sample_id and the columns `SIDECAR_STAT`, lists in the order of `sidecars`.

    `files` has the columns sample_id, dataset and sidecars, a list of paths; it is null for captions that are
    not in files.
    """
    each = files.drop_nulls("sidecars").rename({"sidecars": "path"}).explode("path")
    stats = pl.concat(read_stats(sources, each, log=log, doing=doing).values())
    columns = [pl.col(now).alias(name) for now, name in zip(STAT, SIDECAR_STAT, strict=True)]
    return stats.group_by("sample_id", maintain_order=True).agg(columns)


def unchanged_sidecars(
    sources: Mapping[str, Source], rows: pl.DataFrame, granularity_ns: int, *, log: Log
) -> pl.DataFrame:
    """Return the sample_id of each row for which all listed caption files are unchanged, or without any.

    A file that appears or disappears has changed. `rows` has the columns `CAPTIONS`, dataset and sidecars.
    """
    current = sidecar_stats(
        sources, rows.select("sample_id", "dataset", "sidecars"), log=log, doing="captions compared"
    )
    compared = rows.join(current, on="sample_id", how="left", suffix="_now", maintain_order="left")

    # As in git's index, a file that changed within the clock's granularity before it was read is not trusted:
    # a second change might have left the same stat.
    last_change = pl.col("caption_ctime_ns").list.max()
    settled = last_change + granularity_ns < pl.col("caption_read_ns")

    # Number by number: comparing the lists takes five times as long.
    max_files = rows.select(pl.col("sidecars").list.len().max()).item() or 0
    same: list[pl.Expr] = []
    for name in SIDECAR_STAT:
        before, now = pl.col(name).list, pl.col(f"{name}_now").list
        same.append(before.len().eq_missing(now.len()))
        for index in range(max_files):
            same.append(before.get(index, null_on_oob=True).eq_missing(now.get(index, null_on_oob=True)))
    unchanged = pl.all_horizontal(pl.col("sidecars").is_null() | settled, *same)
    return compared.filter(unchanged).select("sample_id")


def _are_equal(rows: pl.DataFrame, others: pl.DataFrame) -> bool:
    """Return whether two tables with equal columns have equal rows."""
    lists = [name for name, kind in rows.schema.items() if kind == pl.List]
    if not rows.drop(lists).equals(others.drop(lists)):
        return False

    # Lengths and elements, because comparing lists with each other takes ten times as long.
    return all(
        rows[name].list.len().equals(others[name].list.len())
        and rows[name].explode().equals(others[name].explode())
        for name in lists
    )
