"""Stage text_embeddings: text embeddings in the cache for each distinct caption.

`needed_captions` -> `text_requests` -> `fill` (missing entries are encoded) -> table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import polars as pl

from pipeline.cache.entry_format import TEXT
from pipeline.cache.requests import STAT_COLUMNS, STATS, RecipeEntries, caption_variants
from pipeline.cache.store import EntrySpec, EntryState
from pipeline.encoding.fill import EntryRequests, fill
from pipeline.encoding.jobs import Job
from pipeline.models.preview_prompts import require_preview_prompts
from pipeline.processes.launch import Launch
from pipeline.reporting.reports import Log, StageResult, Stopwatch
from pipeline.storage.tables import SCHEMAS, empty, row_names, validated

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.storage.tables import Tables

ASSET = "text_embeddings"

_INPUT_COLUMNS = ("sample_id", "dataset", "path", "caption", "more_captions")
"""Columns of validated_dataset that this stage uses."""

_TOKEN_COUNTS = ("num_tokens", "num_cut")
"""Columns that an entry's metadata states."""


def needed_captions(recipe: Recipe, captions: Iterable[str]) -> pl.Series:
    """Return the sorted distinct captions: these, those of the previews, and the empty one.

    Dropout and guidance use the empty caption.
    """
    texts = [*captions, *recipe.training.preview_captions, ""]
    return pl.Series("caption", texts, dtype=pl.String).unique().sort()


def cache_text(
    recipe: Recipe, validated_table: pl.DataFrame, tables: Tables, *, launch: Launch, log: Log
) -> StageResult:
    """Bring the text embeddings of all captions, the empty one and the previews' prompts up to date.

    Nothing is launched if nothing is missing.

    Args:
        recipe: Recipe whose `text` settings and base model decide the keys.
        validated_table: Table validated_dataset.
        tables: Tables of earlier runs; entries whose stat is as recorded there are trusted.
        launch: Starts the encoding processes.
        log: Receives a summary of missing and damaged entries.

    Returns:
        Table text_embeddings with one row per caption of a sample, no rejected samples, and counters of
        entries.

    Raises:
        ModelError: The base model cannot be found, or its encoder returns values that are not finite.
        RecipeError: A preview prompt does not suit the base model.
        StoreError: The cache cannot be read or written.
        LatentlineError: See `Launch`.
    """
    watch = Stopwatch()
    entries = RecipeEntries(recipe, log=log)
    require_preview_prompts(recipe, entries.family)

    # One row per (sample, caption); samples with equal captions share an entry.
    captions = caption_variants(validated_table.select(_INPUT_COLUMNS))
    previous = tables.read_previous(ASSET, ("key", "text_length", *_TOKEN_COUNTS, *STAT_COLUMNS))
    requests = _entry_requests(entries, needed_captions(recipe, captions["caption"]), previous)
    result = fill(entries, requests, launch=launch, log=log, watch=watch)

    entry_of_caption = requests.rows.select("caption", "key").join(result.entries, on="key")
    table = captions.join(entry_of_caption, on="caption", maintain_order="left")
    table = table.with_columns(dtype=pl.lit(recipe.text.dtype)).select(*SCHEMAS[ASSET])
    table = validated(ASSET, table, "result of text_embeddings").sort(row_names(ASSET))

    removed = 0
    if previous is not None:
        removed = len(previous.select("key").unique().join(requests.rows, on="key", how="anti"))
    report = {
        **result.counters(removed),
        "samples": len(validated_table),
        "in": len(validated_table),
        "kept": len(validated_table),
        "rejected": 0,
        "captions_cut": int((table["num_cut"] > 0).sum()),
        **watch.numbers(),
    }
    return StageResult(table, empty("rejected"), report)


def _entry_requests(
    entries: RecipeEntries, captions: pl.Series, previous: pl.DataFrame | None
) -> EntryRequests:
    rows = entries.text_requests(captions, previous, STATS | dict.fromkeys(_TOKEN_COUNTS, pl.Int32))
    token_counts = {name: partial(_stated_count, name) for name in _TOKEN_COUNTS}
    return EntryRequests(
        kind="text",
        rows=rows.with_columns(name="caption", cost=pl.lit(1, pl.Int32)),
        settings={"compute_dtype": entries.recipe.text.compute_dtype},
        spec=lambda row: EntrySpec("text", row["key"], entries.text_tensors()),
        job=lambda row: _job(entries, row["caption"]),
        facts={**token_counts, "text_length": _text_length},
    )


def _stated_count(name: str, state: EntryState) -> int | None:
    return (state.metadata or {}).get(name)


def _text_length(state: EntryState) -> int | None:
    return state.shapes[TEXT][0] if state.shapes else None


def _job(entries: RecipeEntries, caption: str) -> Job:
    # A caption may be longer than an entry's header, so the header states its hash.
    inputs = dict(vars(entries.text_inputs(caption)))
    inputs["caption"] = hashlib.sha256(caption.encode("utf-8")).hexdigest()
    name = f"the caption {caption[:60]!r}" if caption else "the empty caption"
    return Job(entries.text_spec(caption), {"inputs": inputs}, {"caption": caption}, name, 1)
