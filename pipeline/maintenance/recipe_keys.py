"""Keys of the cache entries that recipes need, from their tables and as their settings are now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from pipeline.cache.recipe_entries import SEEN, RecipeEntries
from pipeline.side_inputs import SIDE_INPUTS
from pipeline.storage.tables import Tables
from pipeline.text_embeddings.caption_rows import CAPTION_COLUMNS, text_rows
from pipeline.text_embeddings.stage import needed_texts
from pipeline.vae_latents.side_inputs import without_refused

if TYPE_CHECKING:
    from pipeline.log import Log
    from pipeline.recipe import Recipe


def recipe_keys(recipe: Recipe, *, log: Log) -> list[pl.Series]:
    """Return the keys that the next cache job would request for an unchanged dataset, like its lists.

    A recipe without tables has no entries yet.

    Args:
        recipe: Recipe.
        log: Receives the progress of hashing a model.

    Raises:
        ModelError: The base model cannot be found.
        TableError: A table cannot be read.
    """
    entries, tables = RecipeEntries(recipe, log=log), Tables(recipe.output_dir)
    by_kind: dict[str, list[pl.Series]] = {}
    if tables.path("aspect_buckets").is_file():
        requests, _ = without_refused(entries, entries.latent_requests(tables.read("aspect_buckets")))
        by_kind["latents"] = [requests["key"]]
        for side_input in SIDE_INPUTS:
            keys = side_input.entry_rows(entries, requests)["key"]
            by_kind.setdefault(side_input.kind, []).append(keys)
    if tables.path("validated_dataset").is_file():
        texts = needed_texts(entries, text_rows(entries, tables.read("validated_dataset", CAPTION_COLUMNS)))
        by_kind["text"] = [entries.text_keys(texts["caption"], texts.get_column(SEEN, default=None))]
    return [pl.concat(parts) for parts in by_kind.values()]
