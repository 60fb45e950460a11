"""Whether an image or a caption is among what a LoRA was trained on, by hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import TrainingError, counted

TABLE_FILE = "samples.parquet"
"""Beside a LoRA: the samples it was trained on."""

MAX_CAPTION_BYTES = 1_000_000


def caption_hash(caption: str) -> str:
    """sha256 of a caption as UTF-8, in hex digits."""
    return hashlib.sha256(caption.encode("utf-8")).hexdigest()


def caption_hashes_of(path: Path) -> list[str]:
    """The hashes that a caption in this text file may have; none if it holds no text."""
    if path.stat().st_size > MAX_CAPTION_BYTES:
        return []
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return []
    return sorted({caption_hash(text), caption_hash(text.strip()), caption_hash(" ".join(text.split()))})


def found_in(record: Mapping[str, Any], lora: Path, wanted: Path) -> list[str]:
    """What there is to say of `wanted`: a line for the record, and one for each row of the table it is in.

    Args:
        record: The LoRA's provenance.
        lora: Its file or folder; the table is looked for beside it.
        wanted: An image, or a text file with a caption.

    Raises:
        TrainingError: The record lists no hashes, being of too many samples, and there is no table.
    """
    with wanted.open("rb") as file:
        image = hashlib.file_digest(file, "sha256").hexdigest()
    captions = caption_hashes_of(wanted)
    samples = record["samples"]
    table = (lora if lora.is_dir() else lora.parent) / TABLE_FILE
    if "images" not in samples and not table.is_file():
        fix = f"put {TABLE_FILE}, which was made with the LoRA, beside it"
        what = f"the file names {counted(samples['number'], 'sample')} by a digest only"
        raise TrainingError(what, where=str(lora), fix=fix)
    found: list[str] = []
    if image in samples.get("images", ()):
        found.append(f"{wanted} is one of the images that it was trained on")
    if set(captions) & set(samples.get("captions", ())):
        found.append(f"{wanted} holds one of the captions that it was trained on")
    return found + _rows(table, image, captions)


def _rows(table: Path, image: str, captions: list[str]) -> list[str]:
    import polars as pl

    if not table.is_file():
        return []
    columns = ["sample_id", "content_hash", "caption_hashes", "times_seen", "split"]
    rows = pl.read_parquet(table, columns=columns).filter(pl.col("split") == "train")
    used = rows.filter(
        (pl.col("content_hash") == image)
        | pl.col("caption_hashes").str.split(" ").list.eval(pl.element().is_in(captions)).list.any()
    )
    return [
        f"sample {row['sample_id']}, seen {counted(row['times_seen'], 'time')}" for row in used.to_dicts()
    ]
