"""The declared columns of each table, with type and description.

Types are names of Polars types, because definitions load without Polars. `tables/schemas.py` builds the
Pandera schemas.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

DtypeName = Literal["String", "Int32", "Int64", "Float64", "Boolean"]


class Column(NamedTuple):
    """What the schema of a table states about one column."""

    dtype: DtypeName
    description: str
    nullable: bool = False
    required: bool = True


DeclaredColumns = dict[str, Column]


def _text(description: str, *, nullable: bool = False) -> Column:
    return Column("String", description, nullable=nullable)


def _int32(description: str) -> Column:
    return Column("Int32", description)


def _int64(description: str) -> Column:
    return Column("Int64", description)


def _float64(description: str) -> Column:
    return Column("Float64", description)


def _boolean(description: str) -> Column:
    return Column("Boolean", description)


def _unmeasured(dtype: DtypeName, description: str) -> Column:
    return Column(dtype, f"{description} Null if too few other captions exist.", nullable=True)


def _judged(description: str) -> Column:
    return Column("Float64", f"{description} Null if the variant was not judged.", nullable=True)


def _optional(dtype: DtypeName, description: str) -> Column:
    return Column(dtype, description, nullable=True, required=False)


_SAMPLE: DeclaredColumns = {
    "sample_id": _text("Dataset name and relative POSIX path, NFC."),
    "dataset": _text("Name of the dataset in the recipe."),
    "path": _text("Path relative to the dataset, spelled as in the file system."),
}
_CONTENT: DeclaredColumns = {
    "content_hash": _text("SHA-256 of the image file's bytes."),
    "height": _int32("Height in pixels after EXIF orientation."),
    "width": _int32("Width in pixels after EXIF orientation."),
}
_DUPLICATES: DeclaredColumns = {
    "duplicate_group": _text("Smallest content hash among the images that look the same."),
}
_GEOMETRY: DeclaredColumns = {
    "bucket": _text("Target size as <height>x<width>."),
    "resized_height": _int32("Height after scaling, before the crop."),
    "resized_width": _int32("Width after scaling, before the crop."),
    "crop_top": _int32("Top edge of the crop in resized pixels."),
    "crop_left": _int32("Left edge of the crop in resized pixels."),
    "target_height": _int32("Height after the crop, as seen by the VAE."),
    "target_width": _int32("Width after the crop, as seen by the VAE."),
}
_ENTRY: DeclaredColumns = {
    "key": _text("Key of the cache entry."),
    "dtype": _text("Dtype of the stored tensors."),
    "entry_bytes": _int64("Size of the entry's file when it was last verified."),
    "entry_mtime_ns": _int64("Modification time of the entry's file when it was last verified."),
    "entry_ctime_ns": _int64("Change time of the entry's file when it was last verified."),
    "entry_inode": _int64("Inode of the entry's file when it was last verified."),
}

ASSET_COLUMNS: dict[str, DeclaredColumns] = {
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
        "caption_from": _text(
            'Caption source: "sidecar:<path>", "filename", "fixed", "column", "model", "fallback", "edit".'
        ),
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
    "captions": {
        **_SAMPLE,
        "content_hash": _text("SHA-256 of the image file's bytes."),
        "caption": _text("Canonical caption of the model; empty if it wrote nothing."),
        "num_tokens": _int32("Number of tokens that the model wrote."),
        "cut": _boolean("Whether captions.max_tokens ended the caption."),
        **{name: column for name, column in _ENTRY.items() if name != "dtype"},
    },
    "diagnosis": {
        **_SAMPLE,
        "variant": _int32("Index of the caption among the sample's captions."),
        "caption": _text("Canonical caption."),
        "score": _unmeasured(
            "Float64", "How much better the best of the other captions fits, relative to the loss."
        ),
        "low": _unmeasured("Float64", "Lower end of the score's interval."),
        "high": _unmeasured("Float64", "Upper end of the score's interval."),
        "verdict": _text('"fits", "does not fit" or "cannot tell".'),
        "better_caption": _unmeasured(
            "String", "The caption that fits better, of a caption that does not fit."
        ),
        "passes": _int32("Number of forward passes of the base model."),
        "key": _unmeasured("String", "Key of the cache entry."),
        **{
            name: _unmeasured("Int64", _ENTRY[name].description)
            for name in ("entry_bytes", "entry_mtime_ns", "entry_ctime_ns", "entry_inode")
        },
    },
    "evaluation": {
        "run": _text("Run that was evaluated: a folder in runs/."),
        "step": _int64("Step of the LoRA that the picture was drawn with."),
        "strength": _float64("Strength of the LoRA."),
        "prompt": _text("Prompt of the picture."),
        "role": _text('Role of the prompt: "concept", "trained", "other" or "base".'),
        "concept": _text("Concept that the prompt tests: a trigger word or a dataset; empty for base."),
        "seed": _int64("Seed of the first noise."),
        "scorer": _text("Scorer, as the recipe names it."),
        "number": _text('What the score is part of: "learned", "obeys", "drift" or "copies".'),
        "score": _float64("What the picture contributes to the number, see docs/evaluation.md."),
        "picture": _text("Key of the picture's cache entry."),
    },
    "sweep": {
        "variant": _int32("Number of the variant, from 1."),
        "seed": _int64("Seed of the training."),
        "overrides": _text("Values of the keys that vary, as JSON."),
        "run": _text("Run of the variant: a folder in runs/; empty if it could not be planned."),
        "step": _int64("Step after which the variant was judged."),
        "score": _judged("Mean score of the variant, higher is better; see docs/sweeps.md."),
        "behind": _judged("How much higher the best score is, with the same pictures or images."),
        "low": _judged("Lower end of the interval of behind."),
        "high": _judged("Upper end of the interval of behind."),
        "promoted": _boolean("Whether the variant was trained further; in its last row, whether it has won."),
        "steps": _int64("Number of steps that the variant was trained since its row before."),
        "error": _text("Why the variant failed; null if it did not.", nullable=True),
    },
}
"""Columns of each asset's table that all recipes with the asset have, in table order."""

OPTIONAL_ASSETS = ("captions", "diagnosis", "evaluation", "sweep")
"""Assets that only some recipes have."""

_MASK: DeclaredColumns = {
    "mask_path": _optional("String", "Path of the mask file, or of the image if its opacity is the mask."),
    "mask_hash": _optional("String", "SHA-256 of that file's bytes."),
    "mask_mean": _optional("Float64", "Mean weight of the mask before the crop, 0 to 1."),
    "mask_decoding": _optional("String", "As decoding, for the mask."),
}
_MASK_COLUMNS: dict[str, DeclaredColumns] = {
    "validated_dataset": _MASK,
    "aspect_buckets": _MASK,
    "vae_latents": {
        **_MASK,
        "mask_key": _optional("String", "Key of the mask's cache entry."),
        "mask_ppm": _optional("Int32", "Mean weight of the mask within the crop, in millionths."),
        **{
            f"mask_{name}": _optional("Int64", f"As {name}, for the mask's entry.")
            for name in ("entry_bytes", "entry_mtime_ns", "entry_ctime_ns", "entry_inode")
        },
    },
}
"""Columns at the end of a table of a recipe with masks; null for samples of datasets without masks."""

_REFERENCES: DeclaredColumns = {
    "reference_images": _optional(
        "String",
        "The sample's reference images in the recipe's order, a JSON array of objects with path, hash "
        "(SHA-256 of the file's bytes), height and width (after EXIF orientation), and decoding (as in the "
        "column of that name) where it is not null.",
    ),
}
_REFERENCE_COLUMNS: dict[str, DeclaredColumns] = {
    "validated_dataset": _REFERENCES,
    "aspect_buckets": _REFERENCES,
    "vae_latents": {
        **_REFERENCES,
        "reference_keys": _optional("String", "Keys of the references' cache entries, separated by spaces."),
        "reference_stats": _optional(
            "String",
            "Stats of these entries' files when they were last verified, a JSON array of arrays of "
            "entry_bytes, entry_mtime_ns, entry_ctime_ns and entry_inode.",
        ),
    },
    "text_embeddings": _REFERENCES,
    "trained_lora": {
        "reference_keys": _optional("String", "Keys of all its references' entries, separated by spaces."),
        "reference_hashes": _optional("String", "SHA-256 of all its references' files, separated by spaces."),
    },
}
"""Columns that follow in recipes with reference images; null for samples of datasets without references.

text_embeddings has them only if the text encoder sees the references.
"""

SIDE_INPUT_COLUMNS = {"masks": _MASK_COLUMNS, "references": _REFERENCE_COLUMNS}
"""Columns that follow in recipes with side inputs: by side input, then by asset."""

_DECODING: DeclaredColumns = {
    "decoding": _optional(
        "String",
        "Names of the decoding rules of the image that are part of its latent's key, separated by spaces, "
        "such as white_is_zero; null for images without such rules.",
    ),
}
DECODING_COLUMNS: dict[str, DeclaredColumns] = dict.fromkeys(
    ("validated_dataset", "aspect_buckets", "vae_latents"), _DECODING
)
"""Last column of these tables if at least one image has decoding rules."""

PICTURE_COLUMNS: DeclaredColumns = {
    "detail_px": _optional(
        "Float64",
        "Edge of the smallest square copy with the same detail; lower for blurred or enlarged images.",
    ),
    "brightest": _optional("Float64", "Level that 1% of the pixels exceed in the brightest channel, 0 to 1."),
    "contrast": _optional(
        "Float64",
        "Contrast of the 1st and the 99th percentile of the channel with the most contrast, 0 to 1.",
    ),
    "white": _optional(
        "Float64", "Fraction of the pixels that are white or nearly; 0 if the white area is drawn."
    ),
    "bars": _optional("Float64", "Fraction of the area that uniform bars along the edges cover."),
    "colours": _optional("String", "Mean colours of 4x4 parts, in hexadecimal digits."),
    "jpeg_quality": _optional("Int32", "Quality of libjpeg with the same quantization, 1 to 100."),
    "overlay": _optional(
        "Float64",
        "Agreement with a pattern that many images have in one corner, 0 to 1; null without such a pattern.",
    ),
    "view_group": _optional(
        "String", "Smallest content hash among the images that show nearly the same view."
    ),
}
"""Columns of validated_dataset that tables of 0.3.0 lack."""

OPTIONAL_COLUMNS: dict[str, DeclaredColumns] = {
    asset: {
        name: column
        for of_tables in (
            {"validated_dataset": PICTURE_COLUMNS},
            *SIDE_INPUT_COLUMNS.values(),
            DECODING_COLUMNS,
        )
        for name, column in of_tables.get(asset, {}).items()
    }
    for asset in ASSET_COLUMNS
}
"""All columns of each asset's table that may be missing, in table order."""

REJECTED_COLUMNS: DeclaredColumns = {
    **_SAMPLE,
    "stage": _text("Stage that rejected the sample."),
    "reason": _text("Reason code, such as empty_file."),
    "detail": _text("Description of the defect."),
    "fix": _text("Suggested fix."),
    "content_hash": _text("SHA-256 of the file's bytes; null if it could not be read.", nullable=True),
}
"""Columns of the table of rejected samples."""
