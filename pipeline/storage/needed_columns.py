"""The input tables of each stage: the columns that it reads, and the ones that decide its own columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pipeline.storage.table_columns import PICTURE_COLUMNS

SIDE_INPUT_HASHES = ("mask_hash", "reference_images")
"""Columns that identify the side inputs of a sample. Only tables of recipes with masks have the first, only
tables of recipes with references the second."""

DECODING_COLUMNS = ("decoding", "mask_decoding")
"""Columns with the decoding rules of an image and of its mask, which not every table has."""

STAGE_INPUTS: Mapping[str, Sequence[str]] = {
    "raw_images": (),
    "validated_dataset": ("raw_images",),
    "aspect_buckets": ("validated_dataset",),
    "vae_latents": ("aspect_buckets",),
    "text_embeddings": ("validated_dataset",),
    "trained_lora": ("vae_latents", "text_embeddings"),
}
"""Stages of every recipe in the order of the graph, each with its input tables."""

ALL_INPUTS: Mapping[str, Sequence[str]] = {
    **STAGE_INPUTS,
    "captions": ("raw_images",),
    "diagnosis": ("vae_latents", "text_embeddings"),
    "evaluation": ("trained_lora",),
    "sweep": ("vae_latents", "text_embeddings"),
}
"""The same with the stages that only some recipes have."""

# Plain names without Polars types, because definitions load without Polars.
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "captions": {"raw_images": ("sample_id", "dataset", "path", "content_hash", "height", "width")},
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


NEEDED["diagnosis"] = NEEDED["trained_lora"]
NEEDED["sweep"] = NEEDED["trained_lora"]

_SIZE = ("height", "width")
_CAPTIONS = ("caption", "more_captions")
_CROP = ("crop_top", "crop_left", "target_height", "target_width")
_PLACEMENT = ("resized_height", "resized_width", *_CROP)

DERIVED_COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {
    "captions": dict.fromkeys(("caption", "num_tokens", "cut", "key"), ("content_hash", *_SIZE)),
    "validated_dataset": {
        **dict.fromkeys(("duplicate_group", "one_colour", "decoding", *PICTURE_COLUMNS), ("content_hash",)),
        **dict.fromkeys(("caption", "more_captions", "caption_from", "focus_x", "focus_y"), ("path",)),
        **dict.fromkeys(("mask_path", "mask_hash", "mask_mean", "mask_decoding"), ("path",)),
        "reference_images": ("path",),
    },
    "aspect_buckets": {
        **dict.fromkeys(("bucket", "resized_height", "resized_width", "crop_loss", "scale"), _SIZE),
        **dict.fromkeys(("target_height", "target_width"), _SIZE),
        # The position of a random crop depends on the sample's name.
        **dict.fromkeys(("crop_top", "crop_left"), (*_SIZE, "focus_x", "focus_y", "sample_id")),
    },
    "vae_latents": {
        "latent_height": ("target_height",),
        "latent_width": ("target_width",),
        "entry_bytes": ("target_height", "target_width"),
        "key": ("content_hash", *_PLACEMENT, "decoding"),
        "mask_key": ("mask_hash", *_PLACEMENT, "mask_decoding"),
        "mask_ppm": ("mask_hash", *_PLACEMENT),
        "mask_entry_bytes": _CROP[2:],
        "reference_keys": ("reference_images",),
    },
    "text_embeddings": {
        **dict.fromkeys(("variant", "caption", "num_tokens", "num_cut", "text_length"), _CAPTIONS),
        "key": (*_CAPTIONS, "reference_images"),
    },
    "trained_lora": {
        "latent_keys": ("vae_latents.key",),
        "text_keys": ("text_embeddings.key",),
        "caption_hashes": ("text_embeddings.caption",),
        "split": ("vae_latents.content_hash", "vae_latents.duplicate_group"),
        "times_seen": ("vae_latents.dataset", "vae_latents.bucket"),
        "reference_hashes": ("vae_latents.reference_images",),
    },
}
"""Columns of a stage's table with the input columns that decide them. The table's name is written only for a
stage with several inputs. A column that is not listed is copied from the input columns of the same name."""


def column_sources(stage: str, columns: Mapping[str, Collection[str]]) -> dict[str, list[tuple[str, str]]]:
    """Return the columns of `stage` that depend on its inputs, each with pairs of input table and column.

    `columns` has the names of the columns of each table, of `stage` and of its inputs.
    """
    read = {
        table: set(columns[table]).intersection(needed_columns(stage, table) or columns[table])
        for table in ALL_INPUTS[stage]
    }
    sources: dict[str, list[tuple[str, str]]] = {}
    for column in columns[stage]:
        named = DERIVED_COLUMNS.get(stage, {}).get(column, (column,))
        pairs = [
            (table, name.removeprefix(f"{table}."))
            for name in named
            for table in ALL_INPUTS[stage]
            if name.removeprefix(f"{table}.") in read[table]
        ]
        if pairs:
            sources[column] = pairs
    return sources
