"""Report of text_embeddings: a histogram of the captions' lengths in tokens.

reports/text_embeddings/tokens.png      histogram of tokens per caption, and the limit if one is cut
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from pipeline.reporting.pictures import chart, png
from pipeline.reporting.reports import is_current, mark_current
from pipeline.storage.atomic import write_bytes
from pipeline.text_embeddings.caption_rows import EMPTY_CAPTION

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

FOLDER = "text_embeddings"
TOKENS_FILE = "tokens.png"

MIN_TOKENS_SHOWN = 8
"""Smallest range of token counts on the histogram's axis."""

MAX_BARS = 40
"""Maximum number of bars in the histogram."""


def write_caption_report(recipe: Recipe, table: pl.DataFrame) -> Path:
    """Draw the picture below `output_dir/reports` unless it exists for the same counts; return its folder."""
    folder = recipe.output_dir / "reports" / FOLDER

    # Empty captions are written by the stage and not by a person.
    table = table.filter(pl.col("variant") > EMPTY_CAPTION)
    counts = table.group_by("num_tokens", "num_cut").len("captions").sort("num_tokens", "num_cut")
    digest = hashlib.sha256(counts.write_csv().encode("utf-8")).hexdigest()
    if is_current(folder, digest):
        return folder

    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENS_FILE).unlink(missing_ok=True)
    if len(counts):
        write_bytes(folder / TOKENS_FILE, _histogram(counts))

    # The digest comes last, so that the picture is drawn again after an interruption.
    mark_current(folder, digest)
    return folder


def _histogram(counts: pl.DataFrame) -> bytes:
    figure, axes = chart(560, 320)
    tokens, captions = counts["num_tokens"].to_numpy(), counts["captions"].to_numpy()
    shortest, longest = int(tokens.min()), int(tokens.max())

    # Bars of integer width, so that each of them counts the same number of lengths.
    width = -(-(longest - shortest + 1) // MAX_BARS)
    edges = [edge - 0.5 for edge in range(shortest, longest + width + 1, width)]
    axes.hist(tokens, bins=edges, weights=captions, color="tab:blue")

    cut = counts.filter(pl.col("num_cut") > 0)
    if len(cut):
        limit = int((cut["num_tokens"] - cut["num_cut"]).to_numpy().max())
        num_captions = int(cut["captions"].sum())
        axes.axvline(limit + 0.5, color="tab:red", label=f"cut after {limit} tokens: {num_captions:,}")
        axes.legend(loc="upper right", fontsize="small")
    if longest - shortest < MIN_TOKENS_SHOWN:  # captions of one length would fill the axes with one bar
        axes.set_xlim(shortest - MIN_TOKENS_SHOWN / 2, longest + MIN_TOKENS_SHOWN / 2)
    axes.locator_params(integer=True)
    axes.set(xlabel="tokens per caption", ylabel="captions")
    return png(figure)
