"""The stage text_embeddings: what the encoders make of each distinct caption. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pipeline import tables as table_files
from pipeline.encode.missing import Maker, trusted_stats
from pipeline.encode.order import Job
from pipeline.entries import Entries, stat_columns
from pipeline.launching import Launch
from pipeline.reports import Log, StageResult, Stopwatch
from pipeline.store import EntrySpec, EntryState

if TYPE_CHECKING:
    import polars as pl

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
        Table text_embeddings, a row a sample; nothing is ever rejected here; counters of entries.

    Raises:
        ModelError: The base model cannot be found, or its encoder answers with values that are not finite.
        StoreError: The cache cannot be read or written.
        LatentlineError: As `Launch`.
    """
    watch = Stopwatch()
    entries = Entries(recipe)
    rows = validated.to_dicts()
    specs = {caption: entries.text(caption) for caption in wanted_captions(recipe, validated["caption"])}
    captions = {spec.key: caption for caption, spec in specs.items()}
    previous = tables.read_previous(ASSET)
    known = {row["key"]: row for row in previous.to_dicts()} if previous is not None else {}
    made = Maker(entries, "text", launch, log=log, watch=watch).make(
        list(specs.values()),
        lambda spec: _job(entries, captions[spec.key], spec),
        trusted=trusted_stats(list(known.values())),
        settings={"compute_dtype": recipe.text.compute_dtype},
    )
    table = [_row(row, specs[row["caption"]], states=made.states, known=known) for row in rows]
    cut = sum(row["num_cut"] > 0 for row in table)
    removed = known.keys() - {spec.key for spec in specs.values()}
    report = {
        **made.counters(removed),
        "samples": len(table),
        "in": len(rows),
        "kept": len(table),
        "rejected": 0,
        "captions_cut": cut,
        "bytes": sum(state.stat.num_bytes for state in made.states.values() if state.stat),
        **watch.numbers(),
    }
    return StageResult(table_files.frame(ASSET, table), table_files.empty("rejected"), report)


def _job(entries: Entries, caption: str, spec: EntrySpec) -> Job:
    inputs = dict(vars(entries.text_inputs(caption)))
    # A caption may be longer than an entry's header; its hash says which it was.
    inputs["caption"] = hashlib.sha256(inputs["caption"].encode("utf-8")).hexdigest()
    name = f"the caption {caption[:60]!r}" if caption else "the empty caption"
    return Job(spec, {"inputs": inputs}, {"caption": caption}, name, 1)


def _row(
    row: Mapping[str, Any],
    spec: EntrySpec,
    *,
    states: Mapping[str, EntryState],
    known: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """One row of the table; the token counts are the entry's own, or as recorded if it was not read again."""
    state = states[spec.key]
    assert state.stat is not None
    counts = state.metadata if state.metadata is not None else known[spec.key]
    added = {
        "num_tokens": counts["num_tokens"],
        "num_cut": counts["num_cut"],
        "key": spec.key,
        "dtype": spec.tensors["text_embedding"].dtype,
        **stat_columns(state.stat),
    }
    return {name: {**row, **added}[name] for name in table_files.SCHEMAS[ASSET]}
