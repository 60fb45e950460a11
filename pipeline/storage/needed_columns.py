"""Columns that a stage needs of its input tables; the others are not loaded.

Plain names without Polars types, because definitions load without Polars.
"""

from __future__ import annotations

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
            *("target_height", "target_width", "flipped", "mask_hash", "reference_images"),
        ),
        "text_embeddings": (
            *("sample_id", "dataset", "variant", "caption", "text_length"),
            "reference_images",
        ),
    },
}
"""Needed columns by stage and input table; a stage needs all columns of a table that is not listed. Only the
tables of recipes with masks have `mask_hash`, and those of recipes with references `reference_images`."""


def needed_columns(stage: str, table: str) -> tuple[str, ...] | None:
    """Return the columns of `table` that `stage` needs; None for all."""
    return NEEDED.get(stage, {}).get(table)
