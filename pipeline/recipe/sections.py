"""The section of a recipe that decides an asset, and its line in the file."""

from __future__ import annotations

import re
from pathlib import Path

ASSET_SECTIONS = {
    "raw_images": "datasets",
    "validated_dataset": "datasets",
    "aspect_buckets": "buckets",
    "vae_latents": "latents",
    "text_embeddings": "text",
    "trained_lora": "training",
    "captions": "datasets",
    "diagnosis": "diagnosis",
    "evaluation": "evaluation",
    "sweep": "sweep",
}
"""Section that decides most of each asset."""


def section_line(file: Path, section: str) -> int:
    """Return the line of a section in a recipe's file, counted from 1; 1 if the file does not have it."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return 1
    # A search is enough for keys at the start of a line. Parsing all recipes again would double their time.
    start = re.compile(rf"['\"]?{section}['\"]?\s*:")
    return next((number for number, line in enumerate(lines, 1) if start.match(line)), 1)
