"""The captions of training inputs, and the empty caption with the references of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.recipe_entries import SEEN
from pipeline.storage.needed_columns import NEEDED
from pipeline.storage.tables import selected
from pipeline.text_embeddings.caption_rows import EMPTY_CAPTION, with_seen_images
from pipeline.trained_lora.tensors_json import tensors_json

if TYPE_CHECKING:
    from pipeline.cache.recipe_entries import RecipeEntries

EMPTY_COLUMNS: dict[str, Any] = {"empty_text": pl.String, "empty_tensors": pl.String}
"""Further columns of recipes whose text encoder sees references: key and tensors of the empty caption.

Both are null for inputs without references, whose empty caption is that of the job.
"""


def captions_by_sample(entries: RecipeEntries, text: pl.DataFrame) -> pl.DataFrame:
    """Return one row per sample with its `captions`, their keys (`texts`) and their `text_tensors`.

    If the text encoder sees references, the rows also have `EMPTY_COLUMNS`.
    """
    rows = selected("text_embeddings", text, NEEDED["trained_lora"]["text_embeddings"])
    rows = with_seen_images(entries, rows).sort("sample_id", "variant")
    tensors = {length: tensors_json(entries.text_tensors(length)) for length in rows["text_length"].unique()}
    rows = rows.with_columns(
        entries.text_keys(rows["caption"], rows.get_column(SEEN, default=None)).alias("texts"),
        text_tensors=pl.col("text_length").replace_strict(tensors, return_dtype=pl.String),
    )
    by_sample = rows.filter(pl.col("variant") > EMPTY_CAPTION).group_by("sample_id", maintain_order=True)
    captions = by_sample.agg("texts", "text_tensors", captions="caption")
    if entries.text_images is None:
        return captions
    empty = rows.filter(pl.col("variant") == EMPTY_CAPTION)
    empty = empty.select("sample_id", empty_text="texts", empty_tensors="text_tensors")
    return captions.join(empty, on="sample_id", how="left", maintain_order="left")
