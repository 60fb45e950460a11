"""The stage text_embeddings: what the encoders make of each distinct caption. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import polars as pl

from pipeline import tables as table_files
from pipeline.encode.missing import Made, Maker, Wanted, num_removed
from pipeline.encode.order import Job
from pipeline.entries import Entries, caption_rows
from pipeline.entry_format import TEXT
from pipeline.launching import Launch
from pipeline.reports import Log, StageResult, Stopwatch
from pipeline.store import EntrySpec, EntryState

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.tables import Tables

ASSET = "text_embeddings"


def wanted_captions(recipe: Recipe, captions: Iterable[str]) -> list[str]:
    """Each distinct caption, the empty one for dropout and guidance, and the sample prompts; sorted."""
    return sorted({*captions, *recipe.training.sample_prompts, ""})


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
    entries = Entries(recipe)
    asked = caption_rows(validated)
    previous = tables.read_previous(ASSET)
    rows = entries.text_rows(wanted_captions(recipe, asked["caption"].unique()), previous)

    wanted = Wanted(
        rows.with_columns(name="caption", cost=pl.lit(1)),
        spec=lambda row: EntrySpec("text", row["key"], entries.text_tensors()),
        job=lambda row: _job(entries, row["caption"]),
        facts={**{name: partial(_stated, name) for name in _COUNTS}, "text_length": _length},
    )
    maker = Maker(entries, "text", launch, log=log, watch=watch)
    settings = {"compute_dtype": recipe.text.compute_dtype}
    made = maker.make(wanted, known=previous, settings=settings)
    counts = _token_counts(made, previous)
    keys = rows.select("caption", "key")
    found = asked.join(keys, on="caption").join(made.entries, on="key").join(counts, on="key")
    found = found.with_columns(dtype=pl.lit(recipe.text.dtype))
    table = table_files.validated(
        ASSET, found.select(*table_files.SCHEMAS[ASSET]), "what text_embeddings made"
    )
    report = {
        **made.counters(num_removed(previous, rows["key"])),
        "samples": len(validated),
        "in": len(validated),
        "kept": len(validated),
        "rejected": 0,
        "captions_cut": int((table["num_cut"] > 0).sum()),
        **watch.numbers(),
    }
    return StageResult(table.sort("sample_id", "variant"), table_files.empty("rejected"), report)


_COUNTS = ("num_tokens", "num_cut")


def _stated(name: str, state: EntryState) -> int | None:
    return (state.metadata or {}).get(name)


def _length(state: EntryState) -> int | None:
    return state.shapes[TEXT][0] if state.shapes else None


def _job(entries: Entries, caption: str) -> Job:
    inputs = dict(vars(entries.text_inputs(caption)))
    # A caption may be longer than an entry's header; its hash says which it was.
    inputs["caption"] = hashlib.sha256(inputs["caption"].encode("utf-8")).hexdigest()
    name = f"the caption {caption[:60]!r}" if caption else "the empty caption"
    return Job(entries.text(caption), {"inputs": inputs}, {"caption": caption}, name, 1)


def _token_counts(made: Made, previous: pl.DataFrame | None) -> pl.DataFrame:
    """Of each entry, its own counts where it was read; otherwise as they were recorded when it was."""
    tables = [made.facts]
    if previous is not None:
        tables.append(previous.select(made.facts.columns))
    return pl.concat(tables).unique("key", keep="first", maintain_order=True)
