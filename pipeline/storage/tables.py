"""The Parquet tables between the stages: their schemas, and reading and writing them whole.

Tables carry facts, one row a sample; tensors are in the store. Rows are joined by `sample_id` or key, never
by position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import polars as pl

from pipeline.errors import TableError
from pipeline.storage.atomic import write_through

if TYPE_CHECKING:
    import pandera.polars

Columns = dict[str, Any]
"""Column name to Polars type; a name in `NULLABLE` may hold nulls."""

_ID: Columns = {"sample_id": pl.String, "dataset": pl.String, "path": pl.String}
_CONTENT: Columns = {"content_hash": pl.String, "height": pl.Int32, "width": pl.Int32}
_GROUP: Columns = {"duplicate_group": pl.String}
_GEOMETRY: Columns = {
    "bucket": pl.String,
    "resized_height": pl.Int32,
    "resized_width": pl.Int32,
    "crop_top": pl.Int32,
    "crop_left": pl.Int32,
    "target_height": pl.Int32,
    "target_width": pl.Int32,
}
_ENTRY: Columns = {
    "key": pl.String,
    "dtype": pl.String,
    "entry_bytes": pl.Int64,
    "entry_mtime_ns": pl.Int64,
    "entry_ctime_ns": pl.Int64,
    "entry_inode": pl.Int64,
}

SCHEMAS: dict[str, Columns] = {
    "raw_images": {
        **_ID,
        **_CONTENT,
        "file_bytes": pl.Int64,
        "mtime_ns": pl.Int64,
        "ctime_ns": pl.Int64,
        "inode": pl.Int64,
        "scanned_ns": pl.Int64,
        "format": pl.String,
        "mode": pl.String,
        "channels": pl.Int32,
        "orientation": pl.Int32,
        "notes": pl.String,
        "decoder": pl.String,
    },
    "validated_dataset": {
        **_ID,
        **_CONTENT,
        **_GROUP,
        "one_colour": pl.Boolean,
        "file_bytes": pl.Int64,
        "caption": pl.String,
        "more_captions": pl.String,
        "caption_from": pl.String,
        "focus_x": pl.Float64,
        "focus_y": pl.Float64,
        "decoder": pl.String,
    },
    "aspect_buckets": {
        **_ID,
        **_CONTENT,
        **_GROUP,
        **_GEOMETRY,
        "crop_loss": pl.Float64,
        "scale": pl.Float64,
    },
    "vae_latents": {
        **_ID,
        **_CONTENT,
        **_GROUP,
        **_GEOMETRY,
        "latent_channels": pl.Int32,
        "latent_height": pl.Int32,
        "latent_width": pl.Int32,
        "flipped": pl.Boolean,
        **_ENTRY,
    },
    "text_embeddings": {
        **_ID,
        "variant": pl.Int32,
        "caption": pl.String,
        "num_tokens": pl.Int32,
        "num_cut": pl.Int32,
        "text_length": pl.Int32,
        **_ENTRY,
    },
    "trained_lora": {
        **_ID,
        **_CONTENT,
        "bucket": pl.String,
        "latent_keys": pl.String,
        "text_keys": pl.String,
        "caption_hashes": pl.String,
        "split": pl.String,
        "times_seen": pl.Int32,
    },
}
"""Of each asset. A row is a sample; in aspect_buckets a sample and one of its buckets, several only with
`buckets.per_image: each`; in vae_latents these and whether it is `flipped` (mirrored left to right, its
geometry as if it were not); in text_embeddings a sample and a `variant` of its caption.
`height` and `width` are the original size, after EXIF orientation; `duplicate_group` is the same for images
that look alike, the smallest of their content hashes; `one_colour` images have no features; `path` is
relative to the dataset, as the file system spells it; `bucket` is "<height>x<width>"; `crop_*` are in resized
pixels; `scale` is resized over original, above 1 where the image is enlarged; `crop_loss` is the share of the
resized area that is cut off; `scanned_ns` is when the file was read, `notes` says what is odd about it,
`decoder` which decoder saw that; `more_captions` are further variants of `caption`, a JSON array;
`caption_from` is "sidecar:<path>", "filename" or "fixed"; `focus_*` is the point of the image that a crop
keeps in view, as shares from its upper left corner; `text_length` is the number of tokens in the entry, of
padding too where the family stores it; `entry_*` are the stat of the store entry when it was
last verified; `latent_keys`, `text_keys` and `caption_hashes` (sha256) are of all of a sample's views and
variants, with spaces between them; `split` is "train" or "validation"."""

REJECTED: Columns = {
    **_ID,
    "stage": pl.String,
    "reason": pl.String,
    "detail": pl.String,
    "fix": pl.String,
    "content_hash": pl.String,
}
"""One row a rejected sample; `reason` is a code such as `empty_file`."""

ASKED_FOR = "filter_"
"""Beginning of the reasons that a recipe's filters and limit give: nothing is wrong with such a sample."""

DUPLICATE = "duplicate"
"""Reason of a copy of an image that is kept: nothing is wrong with it either."""

_ROWS_AT_ONCE = 8_192
"""Of a table on its way to the disk, encoded in memory: a third of a kilobyte each."""

_COMPRESSION_LEVEL = 1
"""Of Zstandard, the lowest: a table of 10,000 rows is written in two thirds of the time of the usual level,
and is 2% larger."""

NULLABLE = {"content_hash"}
"""Of REJECTED only: a file that could not be read has no hash."""

ASSETS = tuple(SCHEMAS)
"""In the order of the graph."""


def content_digest(*tables: pl.DataFrame, more: str = "") -> str:
    """SHA-256 over the tables as CSV, one after the other, and `more`; in hexadecimal.

    A few thousand rows are text at a time.
    """
    digest = hashlib.sha256()
    for table in tables:
        digest.update(table.clear().write_csv().encode("utf-8"))
        for part in table.iter_slices(_ROWS_AT_ONCE):
            digest.update(part.write_csv(include_header=False).encode("utf-8"))
    digest.update(more.encode("utf-8"))
    return digest.hexdigest()


def not_asked_for() -> pl.Expr:
    """Over rejected rows: True but for copies, and what a recipe's filters and limit left out."""
    return ~pl.col("reason").str.starts_with(ASKED_FOR) & (pl.col("reason") != DUPLICATE)


def empty(asset: str) -> pl.DataFrame:
    """A table of `asset` without rows; `asset` may be "rejected"."""
    return pl.DataFrame(schema=_columns(asset))


def frame(asset: str, rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Rows as a table of `asset` (or "rejected"), sorted by what names a row, `sample_id` first.

    Raises:
        TableError: A column is missing or of another type.
    """
    where = f"rows made for {asset}"
    try:
        table = pl.DataFrame(rows, schema=_columns(asset), strict=True)
    except (TypeError, ValueError, pl.exceptions.PolarsError) as err:
        raise _schema_error(asset, where, str(err)) from err
    return validated(asset, table, where).sort(_unique(asset))


def validated(asset: str, table: pl.DataFrame, where: str) -> pl.DataFrame:
    """The table itself, when it is what the asset's Pandera schema says.

    What that schema asks for is cheap to see with Polars alone; Pandera, which takes half a second to import,
    is asked only when a table seems not to fit, for its verdict and its failure cases.

    Raises:
        TableError: With the first failure cases.
    """
    if _plainly_fits(asset, table):
        return table
    import pandera.errors

    try:
        return pandera_schema(asset).validate(table, lazy=True)
    except (pandera.errors.SchemaError, pandera.errors.SchemaErrors) as err:
        raise _schema_error(asset, where, str(err)) from err


def pandera_schema(asset: str) -> pandera.polars.DataFrameSchema:
    """The schema of the table of `asset` (or "rejected"): columns in order, types, nulls, unique rows."""
    import pandera.polars as pa

    nullable = _nullable(asset)
    columns = {name: pa.Column(kind, nullable=name in nullable) for name, kind in _columns(asset).items()}
    return pa.DataFrameSchema(columns, strict=True, ordered=True, unique=_unique(asset))


def write_rows(table: pl.DataFrame, file: BinaryIO) -> None:
    """Put the table into the file as Parquet, some rows at a time."""
    table.write_parquet(file, compression_level=_COMPRESSION_LEVEL, row_group_size=_ROWS_AT_ONCE)


def only(table: pl.DataFrame, which: pl.Series) -> pl.DataFrame:
    """The rows for which `which` is true: the table itself, and no copy, where all are."""
    return table if which.all() else table.filter(which)


def without(table: pl.DataFrame, others: pl.DataFrame) -> pl.DataFrame:
    """The rows that are not among `others`, some of its samples: the table itself where there are none."""
    if others.is_empty():
        return table
    if len(others) == len(table):
        return table.clear()
    return table.join(others.select("sample_id"), on="sample_id", how="anti", maintain_order="left")


def in_order(table: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    """The table sorted by some columns without nulls: itself, and no copy, where it is so already."""
    falls, _ = _order(table, names)
    return table.sort(names) if falls else table


def _order(table: pl.DataFrame, names: list[str]) -> tuple[bool, bool]:
    """Whether a row comes before the one above it, and whether a row names what the one above it does."""
    first = table[names[0]]
    if not first.null_count() and (first[:-1] < first[1:]).all():
        return False, False
    falls, equal = pl.lit(value=False), pl.lit(value=True)
    for name in names:
        before = pl.col(name).shift(1)
        falls = falls | (equal & (before > pl.col(name)))
        equal = equal & (before == pl.col(name))
    return table.select(falls=falls.any(), equal=equal.any()).row(0)


def _plainly_fits(asset: str, table: pl.DataFrame) -> bool:
    """Whether `pandera_schema(asset)` surely accepts the table; NaN is left to its verdict."""
    if list(table.schema.items()) != list(_columns(asset).items()):
        return False
    return _is_sound(asset, table)


def _is_sound(asset: str, table: pl.DataFrame) -> bool:
    """Whether columns of a table, with those that name a row, surely hold what they may."""
    full = [name for name in table.columns if name not in _nullable(asset)]
    if any(table[name].null_count() for name in full):
        return False
    if any(table[name].is_nan().any() for name, kind in table.schema.items() if kind.is_float()):
        return False
    falls, equal = _order(table, _unique(asset))
    if falls:  # nothing follows of rows that are far apart
        return not table.select(_unique(asset)).is_duplicated().any()
    return not equal


def _nullable(asset: str) -> set[str]:
    return NULLABLE if asset == "rejected" else set()


def _unique(asset: str) -> list[str]:
    """The columns that name a row; tables are sorted by them."""
    more = {
        "rejected": ["stage"],
        "aspect_buckets": ["bucket"],
        "vae_latents": ["bucket", "flipped"],
        "text_embeddings": ["variant"],
    }
    return ["sample_id", *more.get(asset, [])]


class Tables:
    """The tables of one recipe, below `output_dir/tables`."""

    def __init__(self, output_dir: Path) -> None:
        """Nothing is read or made yet."""
        self.folder = output_dir / "tables"

    def path(self, asset: str) -> Path:
        """Where the table of `asset` lies; `asset` may be "rejected"."""
        return self.folder / f"{asset}.parquet"

    def read(self, asset: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """The table as last written.

        Args:
            asset: Whose.
            columns: Only these of it, in this order; all by default.

        Raises:
            TableError: It is missing, unreadable, or of another schema.
        """
        path = self.path(asset)
        if not path.is_file():
            fix = f"materialize {asset} first: dagster job execute -m assets.definitions -j <recipe>_cache"
            raise TableError(f"there is no table of {asset}", where=str(path), fix=fix)
        return _read(asset, path, columns, made_by=asset)

    def read_previous(self, asset: str, columns: Sequence[str] | None = None) -> pl.DataFrame | None:
        """The table of an earlier run, or some of its columns as `read`: what is known already.

        None when there is none, or it is damaged or of an older schema: then everything is looked at anew.
        """
        try:
            return self.read(asset, columns)
        except TableError:
            return None

    def write(self, asset: str, table: pl.DataFrame) -> Path:
        """Replace the table atomically, sorted by what names a row, `sample_id` first.

        Returns:
            The file's path.

        Raises:
            TableError: The table is not what the asset's schema says; nothing is written.
        """
        path = self.path(asset)
        rows = in_order(validated(asset, table, f"what {asset} wanted to write to {path}"), _unique(asset))
        write_through(path, partial(write_rows, rows))
        return path

    def write_rejected(self, stage: str, rows: pl.DataFrame) -> None:
        """Replace the rows of `stage`, then compose `rejected.parquet` from those of all stages.

        Each stage has a file of its own below `tables/rejected`, so that two runs at once never undo each
        other's rows. It composes again where one was replaced meanwhile: what comes last has all rows.
        """
        part = self.folder / "rejected" / f"{stage}.parquet"
        checked = validated("rejected", rows, f"what {stage} wanted to reject")
        write_through(part, partial(write_rows, checked.sort("sample_id")))
        states = list[tuple[int, int]]()
        while states != (states := [(file.stat().st_ino, file.stat().st_mtime_ns) for file in self._parts()]):
            write_through(self.path("rejected"), partial(write_rows, self.read_rejected()))

    def read_rejected(self, stage: str | None = None) -> pl.DataFrame:
        """All rejected rows, or those of one stage; without rows when nothing was ever rejected.

        Raises:
            TableError: A stage's file is unreadable or of another schema.
        """
        parts = [_read("rejected", file, made_by=file.stem) for file in self._parts(stage)]
        return pl.concat(parts) if parts else empty("rejected")

    def _parts(self, stage: str | None = None) -> list[Path]:
        """The files that there are of what stages, or one of them, rejected."""
        stages = ASSETS if stage is None else (stage,)
        files = (self.folder / "rejected" / f"{each}.parquet" for each in stages)
        return [file for file in files if file.is_file()]


def _read(asset: str, path: Path, columns: Sequence[str] | None = None, *, made_by: str) -> pl.DataFrame:
    try:
        if columns is not None and [*pl.read_parquet_schema(path).items()] == [*_columns(asset).items()]:
            table = pl.read_parquet(path, columns=list(dict.fromkeys((*columns, *_unique(asset)))))
            if _is_sound(asset, table):
                return table.select(columns)
        table = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as err:
        fix = f"delete the file and materialize {made_by} again"
        raise TableError(f"the table cannot be read: {err}", where=str(path), fix=fix) from err
    table = validated(asset, table, str(path))
    return table if columns is None else table.select(columns)


def _columns(asset: str) -> Columns:
    return REJECTED if asset == "rejected" else SCHEMAS[asset]


def _schema_error(asset: str, where: str, detail: str) -> TableError:
    made_by = "the stage it is named after" if asset == "rejected" else asset
    fix = f"delete the table and materialize {made_by} again; if it comes back, report it as a defect"
    return TableError(f"this is no table of {asset}: {detail}", where=where, fix=fix)
