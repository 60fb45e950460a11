"""Columns that a stage needs of its input tables; no other columns are loaded."""

from __future__ import annotations

SIDE_INPUT_HASHES = ("mask_hash", "reference_images")
"""Columns that identify the side inputs of a sample. Only tables of recipes with masks have the first, only
tables of recipes with references the second."""

DECODING_COLUMNS = ("decoding", "mask_decoding")
"""Columns with the decoding rules of an image and of its mask, which not every table has."""

# Plain names without Polars types, because definitions load without Polars.
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "validated_dataset": {
        "raw_images": (
            *("sample_id", "dataset", "path", "content_hash", "height", "width"),
            *("file_bytes", "mtime_ns", "ctime_ns", "inode"),
        ),
    },
    "trained_lora": {
        "vae_latents": (
            *("sample_id", "dataset", "path", "content_hash", "height", "width", "duplicate_group"),
            *("bucket", "resized_height", "resized_width", "crop_top", "crop_left"),
            *("target_height", "target_width", "flipped", *SIDE_INPUT_HASHES, *DECODING_COLUMNS),
            # A training marks the entries that it uses, so that latentline gc keeps them.
            *("key", "mask_key", "reference_keys"),
        ),
        "text_embeddings": (
            *("sample_id", "dataset", "variant", "caption", "text_length", "key"),
            "reference_images",
        ),
    },
}
"""Needed columns by stage and input table; a stage needs all columns of a table that is not listed."""


def needed_columns(stage: str, table: str) -> tuple[str, ...] | None:
    """Return the columns of `table` that `stage` needs; None for all."""
    return NEEDED.get(stage, {}).get(table)
