"""What text_embeddings looks like: how long the captions are, as the encoders count.

    reports/text_embeddings/tokens.png      histogram of tokens a caption, and the limit where one is cut

It is drawn anew only when a count has changed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from pipeline.reporting.pictures import chart, png
from pipeline.storage.atomic import write_bytes, write_text

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

FOLDER = "text_embeddings"
TOKENS_FILE = "tokens.png"
_MADE_FOR = "made_for.txt"

MAX_BARS = 40


def write_caption_report(recipe: Recipe, table: pl.DataFrame) -> Path:
    """Draw the picture below `output_dir/reports`, unless it is of these counts.

    Args:
        recipe: Whose output folder it is.
        table: text_embeddings.

    Returns:
        The folder.
    """
    folder = recipe.output_dir / "reports" / FOLDER
    made_for = folder / _MADE_FOR
    counts = table.group_by("num_tokens", "num_cut").len("captions").sort("num_tokens", "num_cut")
    digest = hashlib.sha256(counts.write_csv().encode("utf-8")).hexdigest()
    if made_for.is_file() and made_for.read_text(encoding="utf-8") == digest:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENS_FILE).unlink(missing_ok=True)
    if len(counts):
        write_bytes(folder / TOKENS_FILE, _histogram(counts))
    write_text(made_for, digest)
    return folder


def _histogram(counts: pl.DataFrame) -> bytes:
    """Start and end marks are counted too; bars are at least one token wide."""
    figure, axes = chart(560, 320)
    tokens, captions = counts["num_tokens"].to_numpy(), counts["captions"].to_numpy()
    least, most = int(tokens.min()), int(tokens.max())
    width = -(-(most - least + 1) // MAX_BARS)
    edges = [edge - 0.5 for edge in range(least, most + width + 1, width)]
    axes.hist(tokens, bins=edges, weights=captions, color="tab:blue")
    cut = counts.filter(pl.col("num_cut") > 0)
    if len(cut):
        limit = int((cut["num_tokens"] - cut["num_cut"]).to_numpy().max())
        number = int(cut["captions"].sum())
        axes.axvline(limit + 0.5, color="tab:red", label=f"cut behind {limit} tokens: {number:,}")
        axes.legend(loc="upper right", fontsize="small")
    axes.set(xlabel="tokens of a caption", ylabel="captions")
    return png(figure)
