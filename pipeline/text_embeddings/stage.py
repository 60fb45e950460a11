"""The stage text_embeddings: what the encoders make of each distinct caption. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import polars as pl

from pipeline.cache.entry_format import TEXT
from pipeline.cache.requests import STAT_COLUMNS, STATS, RecipeEntries, caption_variants
from pipeline.cache.store import EntrySpec, EntryState
from pipeline.encoding.fill import Maker, Wanted
from pipeline.encoding.jobs import Job
from pipeline.processes.launch import Launch
from pipeline.reporting.reports import Log, StageResult, Stopwatch
from pipeline.storage import tables as table_files
from pipeline.storage.columns import distinct, joined, num_beyond, with_constant

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.storage.tables import Tables

ASSET = "text_embeddings"


def wanted_captions(recipe: Recipe, captions: Iterable[str]) -> pl.Series:
    """Each distinct caption, the empty one for dropout and guidance, and the sample prompts; sorted."""
    texts = pl.Series("caption", captions, dtype=pl.String)
    more = pl.Series("caption", [*recipe.training.sample_prompts, ""], dtype=pl.String)
    return distinct(pl.concat([texts, more]))


def cache_text(
    recipe: Recipe, validated: pl.DataFrame, tables: Tables, *, launch: Launch, log: Log
) -> StageResult:
    """A valid entry for each distinct caption, the empty caption and the sample prompts.

    Nothing is launched when nothing is missing.

    Args:
        recipe: Its `text` settings and base model decide the keys.
        validated: Table validated_dataset.
        tables: Where the last table is found: its entries are trusted as long as their stat is unchanged.
        launch: Starts the encoder.
        log: Told what is missing and damaged.

    Returns:
        Table text_embeddings, a row for each variant of a sample's caption; nothing is ever rejected here;
        counters of entries.

    Raises:
        ModelError: The base model cannot be found, or its encoder answers with values that are not finite.
        StoreError: The cache cannot be read or written.
        LatentlineError: As `Launch`.
    """
    watch = Stopwatch()
    entries = RecipeEntries(recipe)
    asked = caption_variants(validated.select(_ASKED))
    rows, removed = _to_look_at(entries, wanted_captions(recipe, asked["caption"]), tables)

    wanted = Wanted(
        rows,
        spec=lambda row: EntrySpec("text", row["key"], entries.text_tensors()),
        job=lambda row: _job(entries, row["caption"]),
        facts={**{name: partial(_stated, name) for name in _COUNTS}, "text_length": _length},
    )
    maker = Maker(entries, "text", launch, log=log, watch=watch)
    made = maker.make(wanted, settings={"compute_dtype": recipe.text.compute_dtype})
    entry_of = joined(rows.select("caption", "key"), made.entries, on="key")
    found = with_constant(joined(asked, entry_of, on="caption"), "dtype", recipe.text.dtype, pl.String)
    table = table_files.validated(
        ASSET, found.select(*table_files.SCHEMAS[ASSET]), "what text_embeddings made"
    )
    report = {
        **made.counters(removed),
        "samples": len(validated),
        "in": len(validated),
        "kept": len(validated),
        "rejected": 0,
        "captions_cut": int((table["num_cut"] > 0).sum()),
        **watch.numbers(),
    }
    ordered = table_files.in_order(table, ["sample_id", "variant"])
    return StageResult(ordered, table_files.empty("rejected"), report)


_ASKED = ("sample_id", "dataset", "path", "caption", "more_captions")
"""Columns of validated_dataset that are looked at."""

_COUNTS = ("num_tokens", "num_cut")


def _to_look_at(entries: RecipeEntries, captions: pl.Series, tables: Tables) -> tuple[pl.DataFrame, int]:
    """What `Wanted` and `_job` need, a row a caption.

    Beside it: how many entries of the last table are not wanted any more.
    """
    known = tables.read_previous(ASSET, ("key", "text_length", *_COUNTS, *STAT_COLUMNS))
    rows = entries.text_requests(captions, known, STATS | dict.fromkeys(_COUNTS, pl.Int32))
    rows = rows.with_columns(name="caption")
    unwanted = 0 if known is None else num_beyond(known["key"], rows["key"])
    return with_constant(rows, "cost", 1, pl.Int32), unwanted


def _stated(name: str, state: EntryState) -> int | None:
    return (state.metadata or {}).get(name)


def _length(state: EntryState) -> int | None:
    return state.shapes[TEXT][0] if state.shapes else None


def _job(entries: RecipeEntries, caption: str) -> Job:
    inputs = dict(vars(entries.text_inputs(caption)))
    # A caption may be longer than an entry's header; its hash says which it was.
    inputs["caption"] = hashlib.sha256(inputs["caption"].encode("utf-8")).hexdigest()
    name = f"the caption {caption[:60]!r}" if caption else "the empty caption"
    return Job(entries.text_spec(caption), {"inputs": inputs}, {"caption": caption}, name, 1)
