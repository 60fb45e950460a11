"""Which columns a stage needs of the tables before it; the others are not read.

Plain names: definitions are loaded without Polars.
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
            *("target_height", "target_width", "flipped"),
        ),
        "text_embeddings": ("sample_id", "variant", "caption", "text_length"),
    },
}
"""By stage and table. Of a table that a stage reads and that is not named it needs all."""


def needed_columns(stage: str, table: str) -> tuple[str, ...] | None:
    """What the stage needs of a table that it reads; None for all of it."""
    return NEEDED.get(stage, {}).get(table)
