"""The stage text_embeddings: what the encoders make of each distinct caption. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import polars as pl

from pipeline import tables as table_files
from pipeline.encode.missing import Made, Maker
from pipeline.encode.order import Job
from pipeline.entries import TEXT, Entries, caption_rows
from pipeline.launching import Launch
from pipeline.reports import Log, StageResult, Stopwatch

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
    captions = wanted_captions(recipe, asked["caption"].unique())
    previous = tables.read_previous(ASSET)
    wanted = entries.text_rows(captions, previous)

    def jobs(keys: Sequence[str]) -> list[Job]:
        doubtful = wanted.filter(pl.col("key").is_in(keys))
        return [_job(entries, caption) for caption in doubtful["caption"]]

    maker = Maker(entries, "text", launch, log=log, watch=watch)
    made = maker.make(
        wanted.select("key", "num_bytes", "about_bytes"),
        jobs,
        known=previous,
        settings={"compute_dtype": recipe.text.compute_dtype},
    )
    counts = _token_counts(made, previous)
    keys = wanted.select("caption", "key")
    rows = asked.join(keys, on="caption").join(made.entries, on="key").join(counts, on="key")
    rows = rows.with_columns(dtype=pl.lit(recipe.text.dtype))
    table = table_files.validated(
        ASSET, rows.select(*table_files.SCHEMAS[ASSET]), "what text_embeddings made"
    )
    report = {
        **made.counters(0 if previous is None else len(set(previous["key"]) - set(wanted["key"]))),
        "samples": len(validated),
        "in": len(validated),
        "kept": len(validated),
        "rejected": 0,
        "captions_cut": int((table["num_cut"] > 0).sum()),
        **watch.numbers(),
    }
    return StageResult(table.sort("sample_id", "variant"), table_files.empty("rejected"), report)


def _job(entries: Entries, caption: str) -> Job:
    inputs = dict(vars(entries.text_inputs(caption)))
    # A caption may be longer than an entry's header; its hash says which it was.
    inputs["caption"] = hashlib.sha256(inputs["caption"].encode("utf-8")).hexdigest()
    name = f"the caption {caption[:60]!r}" if caption else "the empty caption"
    return Job(entries.text(caption), {"inputs": inputs}, {"caption": caption}, name, 1)


def _token_counts(made: Made, previous: pl.DataFrame | None) -> pl.DataFrame:
    """Of each entry, its own counts where it was read; otherwise as they were recorded when it was."""
    counts = ("num_tokens", "num_cut")
    schema = {"key": pl.String, **dict.fromkeys((*counts, "text_length"), pl.Int32)}
    read = [
        {"key": key, **{name: said[name] for name in counts}, "text_length": made.shapes[key][TEXT][0]}
        for key, said in made.metadata.items()
    ]
    tables = [pl.DataFrame(read, schema=schema)]
    if previous is not None:
        tables.append(previous.select(*schema))
    return pl.concat(tables).unique("key", keep="first", maintain_order=True)
