"""Schemas of the tables: one Pandera schema per asset, and one for rejected samples.

Tables hold facts and the cache holds tensors. Tables are joined by `sample_id` or `key`, never by position.

| table | one row per |
|---|---|
| raw_images, validated_dataset, trained_lora | sample |
| aspect_buckets | sample and bucket (several buckets only with `buckets.per_image: each`) |
| vae_latents | sample, bucket and mirroring |
| text_embeddings | sample and caption variant |
| rejected | sample and the stage that rejected it |

The tables of recipes with side inputs, such as masks, have more columns at their end: `SIDE_INPUT_COLUMNS`.
The column `decoding` follows if an image has decoding rules, see `images/decode.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from pipeline.errors import TableError

if TYPE_CHECKING:
    import pandera.errors
    import pandera.polars

Columns = dict[str, Any]
"""Column names in table order, each with its Polars type."""


class _Column(NamedTuple):
    """What the Pandera schema of a table states about one column."""

    dtype: type[pl.DataType]
    description: str
    nullable: bool = False
    required: bool = True


_Declared = dict[str, _Column]

FILTER_PREFIX = "filter_"
"""Prefix of the reasons given by a recipe's filters and limit; such a sample is not defective."""

DUPLICATE = "duplicate"
"""Reason given to copies of an image that is already in the dataset; such a sample is not defective."""

_MAX_FAILURES = 5
"""Maximum number of failing rows named in an error message."""

_MAX_FAILURE_CHARS = 160
"""Maximum length of one failing value in an error message."""


def _text(description: str, *, nullable: bool = False) -> _Column:
    return _Column(pl.String, description, nullable=nullable)


def _int32(description: str) -> _Column:
    return _Column(pl.Int32, description)


def _int64(description: str) -> _Column:
    return _Column(pl.Int64, description)


def _float64(description: str) -> _Column:
    return _Column(pl.Float64, description)


def _boolean(description: str) -> _Column:
    return _Column(pl.Boolean, description)


def _optional(dtype: type[pl.DataType], description: str) -> _Column:
    return _Column(dtype, description, nullable=True, required=False)


_SAMPLE: _Declared = {
    "sample_id": _text("Dataset name and relative POSIX path, NFC."),
    "dataset": _text("Name of the dataset in the recipe."),
    "path": _text("Path relative to the dataset, spelled as in the file system."),
}
_CONTENT: _Declared = {
    "content_hash": _text("SHA-256 of the image file's bytes."),
    "height": _int32("Height in pixels after EXIF orientation."),
    "width": _int32("Width in pixels after EXIF orientation."),
}
_DUPLICATES: _Declared = {
    "duplicate_group": _text("Smallest content hash among the images that look the same."),
}
_GEOMETRY: _Declared = {
    "bucket": _text("Target size as <height>x<width>."),
    "resized_height": _int32("Height after scaling, before the crop."),
    "resized_width": _int32("Width after scaling, before the crop."),
    "crop_top": _int32("Top edge of the crop in resized pixels."),
    "crop_left": _int32("Left edge of the crop in resized pixels."),
    "target_height": _int32("Height after the crop, as seen by the VAE."),
    "target_width": _int32("Width after the crop, as seen by the VAE."),
}
_ENTRY: _Declared = {
    "key": _text("Key of the cache entry."),
    "dtype": _text("Dtype of the stored tensors."),
    "entry_bytes": _int64("Size of the entry's file when it was last verified."),
    "entry_mtime_ns": _int64("Modification time of the entry's file when it was last verified."),
    "entry_ctime_ns": _int64("Change time of the entry's file when it was last verified."),
    "entry_inode": _int64("Inode of the entry's file when it was last verified."),
}

_ASSET_COLUMNS: dict[str, _Declared] = {
    "raw_images": {
        **_SAMPLE,
        **_CONTENT,
        "file_bytes": _int64("Size of the image file."),
        "mtime_ns": _int64("Modification time of the image file."),
        "ctime_ns": _int64("Change time of the image file."),
        "inode": _int64("Inode of the image file."),
        "scanned_ns": _int64("Time at which the file was read."),
        "format": _text("Image format, such as JPEG."),
        "mode": _text("Pillow mode of the decoded image."),
        "channels": _int32("Number of channels."),
        "orientation": _int32("EXIF orientation, 1 to 8."),
        "notes": _text("Oddities of the file, such as trailing bytes."),
        "decoder": _text("Decoder and version that read the file."),
    },
    "validated_dataset": {
        **_SAMPLE,
        **_CONTENT,
        **_DUPLICATES,
        "one_colour": _boolean("Whether the image has no features."),
        "file_bytes": _int64("Size of the image file."),
        "caption": _text("First caption, canonical."),
        "more_captions": _text("Further captions as a JSON array."),
        "caption_from": _text('Caption source: "sidecar:<path>", "filename", "fixed", "column", "fallback".'),
        "focus_x": _float64("Horizontal focus point that a crop keeps in view, 0 (left) to 1."),
        "focus_y": _float64("Vertical focus point that a crop keeps in view, 0 (top) to 1."),
        "decoder": _text("Decoder and version that checked the file."),
    },
    "aspect_buckets": {
        **_SAMPLE,
        **_CONTENT,
        **_DUPLICATES,
        **_GEOMETRY,
        "crop_loss": _float64("Fraction of the resized area that the crop removes."),
        "scale": _float64("Resized over original size; above 1 the image is upscaled."),
    },
    "vae_latents": {
        **_SAMPLE,
        **_CONTENT,
        **_DUPLICATES,
        **_GEOMETRY,
        "latent_channels": _int32("Number of channels of the latent."),
        "latent_height": _int32("Height of the latent."),
        "latent_width": _int32("Width of the latent."),
        "flipped": _boolean("Whether the latent is mirrored left to right; the geometry is not."),
        **_ENTRY,
    },
    "text_embeddings": {
        **_SAMPLE,
        "variant": _int32(
            "Index of the caption among the sample's captions; -1 is the empty caption with its references, "
            "if the text encoder sees references."
        ),
        "caption": _text("Canonical caption."),
        "num_tokens": _int32("Number of tokens of the caption."),
        "num_cut": _int32("Number of tokens beyond the encoder's maximum length."),
        "text_length": _int32("Number of stored tokens, including padding if the family stores it."),
        **_ENTRY,
    },
    "trained_lora": {
        **_SAMPLE,
        **_CONTENT,
        "bucket": _text("Target size as <height>x<width>."),
        "latent_keys": _text("Keys of all latents of the sample, separated by spaces."),
        "text_keys": _text("Keys of all its text embeddings, separated by spaces."),
        "caption_hashes": _text("SHA-256 of all its captions, separated by spaces."),
        "split": _text('"train" or "validation".'),
        "times_seen": _int32("Number of times the sample was trained on."),
    },
}

_MASK: _Declared = {
    "mask_path": _optional(pl.String, "Path of the mask file, or of the image if its opacity is the mask."),
    "mask_hash": _optional(pl.String, "SHA-256 of that file's bytes."),
    "mask_mean": _optional(pl.Float64, "Mean weight of the mask before the crop, 0 to 1."),
    "mask_decoding": _optional(pl.String, "As decoding, for the mask."),
}
_MASK_COLUMNS: dict[str, _Declared] = {
    "validated_dataset": _MASK,
    "aspect_buckets": _MASK,
    "vae_latents": {
        **_MASK,
        "mask_key": _optional(pl.String, "Key of the mask's cache entry."),
        "mask_ppm": _optional(pl.Int32, "Mean weight of the mask within the crop, in millionths."),
        **{
            f"mask_{name}": _optional(pl.Int64, f"As {name}, for the mask's entry.")
            for name in ("entry_bytes", "entry_mtime_ns", "entry_ctime_ns", "entry_inode")
        },
    },
}
"""Columns at the end of a table of a recipe with masks; null for samples of datasets without masks."""

_REFERENCES: _Declared = {
    "reference_images": _optional(
        pl.String,
        "The sample's reference images in the recipe's order, a JSON array of objects with path, hash "
        "(SHA-256 of the file's bytes), height and width (after EXIF orientation), and decoding (as in the "
        "column of that name) where it is not null.",
    ),
}
_REFERENCE_COLUMNS: dict[str, _Declared] = {
    "validated_dataset": _REFERENCES,
    "aspect_buckets": _REFERENCES,
    "vae_latents": {
        **_REFERENCES,
        "reference_keys": _optional(pl.String, "Keys of the references' cache entries, separated by spaces."),
        "reference_stats": _optional(
            pl.String,
            "Stats of these entries' files when they were last verified, a JSON array of arrays of "
            "entry_bytes, entry_mtime_ns, entry_ctime_ns and entry_inode.",
        ),
    },
    "text_embeddings": _REFERENCES,
    "trained_lora": {
        "reference_keys": _optional(pl.String, "Keys of all its references' entries, separated by spaces."),
        "reference_hashes": _optional(
            pl.String, "SHA-256 of all its references' files, separated by spaces."
        ),
    },
}
"""Columns that follow in recipes with reference images; null for samples of datasets without references.

text_embeddings has them only if the text encoder sees the references.
"""

_SIDE_INPUT_COLUMNS = {"masks": _MASK_COLUMNS, "references": _REFERENCE_COLUMNS}

_DECODING: _Declared = {
    "decoding": _optional(
        pl.String,
        "Names of the decoding rules of the image that are part of its latent's key, separated by spaces, "
        "such as white_is_zero; null for images without such rules.",
    ),
}
_DECODING_COLUMNS: dict[str, _Declared] = dict.fromkeys(
    ("validated_dataset", "aspect_buckets", "vae_latents"), _DECODING
)
"""Last column of these tables if at least one image has decoding rules."""

_OPTIONAL_COLUMNS: dict[str, _Declared] = {
    asset: {
        name: column
        for of_tables in (*_SIDE_INPUT_COLUMNS.values(), _DECODING_COLUMNS)
        for name, column in of_tables.get(asset, {}).items()
    }
    for asset in _ASSET_COLUMNS
}

_REJECTED_COLUMNS: _Declared = {
    **_SAMPLE,
    "stage": _text("Stage that rejected the sample."),
    "reason": _text("Reason code, such as empty_file."),
    "detail": _text("Description of the defect."),
    "fix": _text("Suggested fix."),
    "content_hash": _text("SHA-256 of the file's bytes; null if it could not be read.", nullable=True),
}

_ROW_NAMES: dict[str, list[str]] = {
    "aspect_buckets": ["sample_id", "bucket"],
    "vae_latents": ["sample_id", "bucket", "flipped"],
    "text_embeddings": ["sample_id", "variant"],
    "rejected": ["sample_id", "stage"],
}


def row_names(asset: str) -> list[str]:
    """Return the columns that identify a row of `asset`; its table is unique in them and sorted by them."""
    return _ROW_NAMES.get(asset, ["sample_id"])


def _polars_types(columns: _Declared) -> Columns:
    return {name: column.dtype for name, column in columns.items()}


_ALL_COLUMNS = {
    asset: {**columns, **_OPTIONAL_COLUMNS.get(asset, {})}
    for asset, columns in (*_ASSET_COLUMNS.items(), ("rejected", _REJECTED_COLUMNS))
}

SCHEMAS: dict[str, Columns] = {asset: _polars_types(columns) for asset, columns in _ASSET_COLUMNS.items()}
"""Column types of each asset's table."""

SIDE_INPUT_COLUMNS: dict[str, dict[str, Columns]] = {
    name: {asset: _polars_types(columns) for asset, columns in of_tables.items()}
    for name, of_tables in _SIDE_INPUT_COLUMNS.items()
}
"""Types of the columns that follow in recipes with side inputs: by side input, then by asset."""

REJECTED: Columns = _polars_types(_REJECTED_COLUMNS)
"""Column types of the table of rejected samples."""

ASSETS = tuple(SCHEMAS)
"""Asset names in graph order."""


@cache
def pandera_schema(asset: str) -> pandera.polars.DataFrameSchema:
    """Return the schema of `asset` (or "rejected"): ordered columns, types, nulls and unique rows."""
    # Pandera takes half a second and 40 MB to load, and only a table that violates its schema needs it.
    import pandera.polars as pa

    columns = {name: pa.Column(**column._asdict()) for name, column in _ALL_COLUMNS[asset].items()}
    return pa.DataFrameSchema(columns, name=asset, strict=True, ordered=True, unique=row_names(asset))


def columns_in(asset: str, table: pl.DataFrame) -> Columns:
    """Return the columns of `asset`, with the columns of side inputs that `table` has."""
    optional = _polars_types(_OPTIONAL_COLUMNS[asset])
    return {**SCHEMAS[asset], **{name: kind for name, kind in optional.items() if name in table.columns}}


def selected(asset: str, table: pl.DataFrame, columns: Iterable[str] | None) -> pl.DataFrame:
    """Return these columns of a table of `asset`, or all; columns of side inputs may be missing."""
    if columns is None:
        return table
    optional = _OPTIONAL_COLUMNS.get(asset, {})
    return table.select(name for name in columns if name in table.columns or name not in optional)


def has_defect() -> pl.Expr:
    """Return an expression over rejected rows: False for duplicates and for filtered samples."""
    return ~pl.col("reason").str.starts_with(FILTER_PREFIX) & (pl.col("reason") != DUPLICATE)


def empty(asset: str) -> pl.DataFrame:
    """Return a table of `asset` (or "rejected") without rows."""
    return pl.DataFrame(schema=_types(asset))


def frame(asset: str, rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Build a table of `asset` (or "rejected") from rows, sorted by `row_names`.

    Raises:
        TableError: A column is missing or has another type.
    """
    where = f"rows for {asset}"
    try:
        # Strict, because a silent cast would hide a wrong type until another stage reads the table.
        table = pl.DataFrame(rows, schema=_types(asset), strict=True)
    except (TypeError, ValueError, pl.exceptions.PolarsError) as err:
        raise _schema_error(asset, where, str(err)) from err
    return validated(asset, table, where).sort(row_names(asset))


def validated(asset: str, table: pl.DataFrame, where: str) -> pl.DataFrame:
    """Validate `table` against the Pandera schema of `asset` and return it.

    Args:
        asset: Name of the asset, or "rejected".
        table: Table to validate.
        where: Location of the table, for the error message.

    Raises:
        TableError: The table violates the schema; the message names the first failing rows.
    """
    if _is_valid(asset, table):
        return table
    import pandera.errors

    try:
        return pandera_schema(asset).validate(table, lazy=True)
    except pandera.errors.SchemaErrors as err:
        raise _schema_error(asset, where, _failures(err)) from err


def _is_valid(asset: str, table: pl.DataFrame) -> bool:
    """Return whether `pandera_schema(asset)` accepts the table."""
    types = dict(table.schema)
    declared = {
        name: column for name, column in _ALL_COLUMNS[asset].items() if column.required or name in types
    }
    if list(types.items()) != [(name, column.dtype) for name, column in declared.items()]:
        return False
    for name, column in declared.items():
        values = table[name]
        if not column.nullable and (
            values.has_nulls() or (values.dtype.is_float() and values.is_nan().any())
        ):
            return False
    return table.select(row_names(asset)).n_unique() == len(table)


def _types(asset: str) -> Columns:
    return REJECTED if asset == "rejected" else SCHEMAS[asset]


def _failures(errors: pandera.errors.SchemaErrors) -> str:
    """Describe the first failures, one per line."""
    cases = errors.failure_cases
    lines: list[str] = []
    for case in cases.head(_MAX_FAILURES).iter_rows(named=True):
        row = "" if case["index"] is None else f" in row {case['index']}"
        value = str(case["failure_case"])[:_MAX_FAILURE_CHARS]
        lines.append(f"{case['column'] or 'table'}: check {case['check']} failed for {value}{row}")

    if len(cases) > _MAX_FAILURES:
        lines.append(f"and {len(cases) - _MAX_FAILURES:,} more")
    return "\n".join(lines)


def _schema_error(asset: str, where: str, detail: str) -> TableError:
    stage = "the stage it is named after" if asset == "rejected" else asset
    return TableError(
        f"the table does not match the schema of {asset}:\n{detail}",
        where=where,
        fix=f"delete the table and materialize {stage} again; if the error returns, report it as a bug",
    )
