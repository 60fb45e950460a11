"""Stage diagnosis: measure with the base model which captions do not fit their images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.entry_format import LOSSES
from pipeline.cache.recipe_entries import STAT_COLUMNS, RecipeEntries, is_unchanged
from pipeline.diagnosis.caption_swap import Verdict, verdict_of
from pipeline.diagnosis.entries import loss_requests, loss_spec, swapped_inputs
from pipeline.diagnosis.report import write_sheet
from pipeline.encoding.fill import fill
from pipeline.errors import TrainingError, counted
from pipeline.log import Log
from pipeline.recipe.diagnosis import MIN_OTHERS
from pipeline.reporting.reports import StageResult, Stopwatch
from pipeline.storage.tables import SCHEMAS, Tables, empty, row_names, validated
from pipeline.text_embeddings.stage import caption_requests
from pipeline.trained_lora.stage import require_open_gates

if TYPE_CHECKING:
    from pipeline.processes.launch import Launch
    from pipeline.recipe import Recipe

ASSET = "diagnosis"

MIN_FITTING = 0.5
"""Minimum fraction of captions that fit. A base model that does not know the words prefers one of many other
captions for nearly every image, and often with certainty.
"""

NUM_WORST = 20
"""Number of captions in the report, the worst first."""


def diagnose(
    recipe: Recipe, latents: pl.DataFrame, text: pl.DataFrame, tables: Tables, *, launch: Launch, log: Log
) -> StageResult:
    """Measure each caption of the dataset, and draw those that do not fit into `reports/diagnosis/`.

    Only losses that are not in the cache are measured; nothing is launched if none is missing.

    Args:
        recipe: The recipe.
        latents: Table of vae_latents.
        text: Table of text_embeddings.
        tables: Tables of the recipe.
        launch: Launches the process with the base model.
        log: Log of the step.

    Raises:
        GateClosedError: An upstream gate is closed; nothing was launched.
        ModelError: The base model cannot be found or loaded.
        StoreError: The cache cannot be read or written.
        TrainingError: The base model is sharded, memory ran out, or a sample has no text embedding.
    """
    if recipe.accelerate.shard:
        # The processes run different numbers of forward passes, and a sharded model needs all at each pass.
        raise TrainingError(
            "accelerate.shard divides the base model among processes, but each one measures alone",
            where=str(recipe.source),
            fix="copy the recipe with latentline new, and remove accelerate.shard from the copy",
        )
    watch = Stopwatch()
    # The command, and a selection of this asset alone, run no check of the assets before it.
    require_open_gates(recipe, log=log)
    entries = RecipeEntries(recipe, log=log)
    # A sample with a rejected caption has a latent all the same.
    latents = latents.join(tables.read_rejected("text_embeddings"), on="sample_id", how="anti")
    inputs = swapped_inputs(entries, latents, text)
    requests = loss_requests(entries, inputs, tables.read_previous(ASSET))

    # Captions with an exchanged word are encoded only for images that are measured now.
    missing = requests.rows.filter(~is_unchanged(entries.store, "diagnoses", requests.rows))
    composed = missing.select(caption=pl.col("captions").explode()).unique().sort("caption")
    composed = composed.join(text.select("caption"), on="caption", how="anti", maintain_order="left")
    fill(entries, caption_requests(entries, composed), launch=launch, log=log, watch=watch)
    filled = fill(entries, requests, launch=launch, log=log, watch=watch)

    verdicts = {
        row["key"]: verdict_of(entries.store.read(loss_spec(row))[LOSSES])
        for row in requests.rows.iter_rows(named=True)
    }
    table = diagnosis_table(inputs, verdicts)
    table = table.join(filled.entries.select("key", *STAT_COLUMNS), on="key", how="left")
    table = table.select(pl.col(name).cast(kind) for name, kind in SCHEMAS[ASSET].items())
    table = validated(ASSET, table, "result of diagnosis").sort(row_names(ASSET))

    why = cannot_tell(entries, table)
    if why:
        table = table.with_columns(verdict=pl.lit("cannot tell"), better_caption=pl.lit(None, pl.String))
    worst = table.filter(verdict="does not fit").sort("score", "sample_id", descending=[True, False])
    write_sheet(recipe, worst, table, log=log)
    counters = filled.counters(0)
    report = {
        "samples": table["sample_id"].n_unique(),
        "captions": len(table),
        "decided": not why,
        "why": why or _summary(table),
        **{
            name.replace(" ", "_"): table.filter(verdict=name).height
            for name in ("fits", "does not fit", "cannot tell")
        },
        "passes": int(table["passes"].sum()),
        "worst": worst.head(NUM_WORST)
        .select("sample_id", "caption", "score", "low", "high", "better_caption")
        .to_dicts(),
        **{name: counters[name] for name in ("encoded", "reused", "damaged")},
        **watch.numbers(),
    }
    return StageResult(table, empty("rejected"), report)


def diagnosis_table(inputs: pl.DataFrame, verdicts: dict[str, Verdict]) -> pl.DataFrame:
    """Return the columns of the table that follow from the verdicts, by key."""
    rows: list[dict[str, Any]] = []
    for row in inputs.iter_rows(named=True):
        verdict = verdicts.get(row["key"])
        names = ("sample_id", "dataset", "path", "variant", "key")
        rows.append({**{name: row[name] for name in names}, "caption": row["captions"][0]})
        rows[-1] |= _columns(verdict, row["captions"])
    columns = {name: kind for name, kind in SCHEMAS[ASSET].items() if name not in STAT_COLUMNS}
    return pl.DataFrame(rows, schema=columns)


def _columns(verdict: Verdict | None, captions: Sequence[str]) -> dict[str, Any]:
    if verdict is None:
        nothing = dict.fromkeys(("score", "low", "high", "better_caption"))
        return {**nothing, "verdict": "cannot tell", "passes": 0}
    does_not_fit = verdict.name == "does not fit"
    return {
        "score": verdict.score,
        "low": verdict.low,
        "high": verdict.high,
        "verdict": verdict.name,
        "better_caption": captions[verdict.best] if does_not_fit else None,
        "passes": verdict.passes,
    }


def cannot_tell(entries: RecipeEntries, table: pl.DataFrame) -> str:
    """Return why the method cannot work for the dataset; empty if it can."""
    if entries.text_images is not None:
        return (
            "cannot tell: the text encoder of the base model sees the references of an image next to its "
            "caption, so captions cannot be exchanged"
        )
    if table["key"].null_count() == len(table):
        return f"cannot tell: no image has {MIN_OTHERS} captions of other images with other words"
    fitting = table.filter(verdict="fits").height
    if fitting < MIN_FITTING * len(table):
        captions = counted(len(table), "caption")
        return (
            f"cannot tell: for the base model, only {fitting:,} of {captions} fit their images better than "
            "other captions, so it does not know what the captions describe, they are too much alike, or "
            "most of them are wrong"
        )
    return ""


def _summary(table: pl.DataFrame) -> str:
    wrong, unknown = (table.filter(verdict=name).height for name in ("does not fit", "cannot tell"))
    text = (
        f"{counted(wrong, 'caption fits', 'captions fit')} its image less than another caption"
        if wrong == 1
        else f"{wrong:,} captions fit their images less than other captions"
    )
    text += f", of {counted(len(table), 'caption')}"
    return text + (f"; {unknown:,} undecided" if unknown else "")
