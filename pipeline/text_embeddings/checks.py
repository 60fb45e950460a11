"""The checks of text_embeddings: every caption there, of the encoders' shapes, of exact size, and finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from pipeline.cache.entry_format import TEXT
from pipeline.cache.requests import STAT_COLUMNS, RecipeEntries, caption_variants, with_recorded
from pipeline.checks.findings import MAX_ROWS, CheckContext, Finding, Outcome, findings
from pipeline.encoding.checks import AT_ONCE, Problems
from pipeline.errors import counted, verb
from pipeline.storage.tables import only

STAGE = "text_embeddings"

_COLUMNS = (
    *("sample_id", "variant", "caption", "num_tokens", "num_cut", "text_length", "key"),
    *STAT_COLUMNS,
)

_CAPTIONS = ("sample_id", "caption", "more_captions")
"""Of validated_dataset."""


def run(context: CheckContext) -> list[Finding]:
    """One finding for each check of text_embeddings, from the tables, the store and the base model's files.

    Raises:
        TableError: There is no table of validated_dataset or text_embeddings.
        ModelError: The recipe's base model cannot be found, or is of no known family.
        StoreError: An entry may not be read.
    """
    table = context.tables.read(STAGE, _COLUMNS)
    entries = RecipeEntries(context.recipe)
    asked = _asked(entries, table)
    problems = Problems(
        entries.store,
        "text",
        _wanted(context, entries, table, asked),
        lambda row: entries.text_spec(row["caption"], row["text_length"]),
    )
    validated = caption_variants(context.tables.read("validated_dataset", _CAPTIONS))
    count = counted(problems.num_entries, "entry", "entries")
    outcomes = {
        "completeness": problems.outcome(
            "completeness",
            f"each of {counted(len(validated), 'caption')} and the empty one has its entry",
            more=list(_out_of_step(entries, table, asked, validated)),
        ),
        "shape_uniformity": problems.outcome(
            "shape_uniformity",
            f"{count} of the shapes that the encoders' configurations say",
            more=list(_other_lengths(entries, table)),
        ),
        "file_size_outliers": problems.outcome("file_size_outliers", f"{count} of exactly the right bytes"),
        "finite_values": problems.outcome("finite_values", f"{count} with sound content"),
        "captions_fit": _captions_fit(entries, table),
    }
    return findings(context, STAGE, outcomes)


def _asked(entries: RecipeEntries, table: pl.DataFrame) -> pl.DataFrame:
    """For each row of the table `text_length` and `num_bytes`, null where its key is not its caption's."""
    names = ["caption", "key"]
    parts = [
        part.select(names).join(
            entries.text_requests(part["caption"].unique().to_list(), part),
            on=names,
            how="left",
            maintain_order="left",
        )
        for part in table.iter_slices(AT_ONCE)
    ]
    return pl.concat(parts or [entries.text_requests([])]).select("text_length", "num_bytes", "about_bytes")


def _wanted(
    context: CheckContext, entries: RecipeEntries, table: pl.DataFrame, asked: pl.DataFrame
) -> pl.DataFrame:
    """Each distinct entry of the table, and those that belong to no sample."""
    columns = ("sample_id", "caption", "key", "text_length", "num_bytes", *STAT_COLUMNS)
    own = only(table.drop("text_length").hstack(asked), asked["about_bytes"].is_not_null())
    own = only(own, own["key"].is_first_distinct()).select(columns)
    extra = entries.text_requests(list(dict.fromkeys(("", *context.recipe.training.sample_prompts))))
    names = [
        f"the sample prompt {caption!r}" if caption else "the empty caption" for caption in extra["caption"]
    ]
    extra = extra.with_columns(pl.Series("sample_id", names, dtype=pl.String))
    extra = with_recorded(extra, None).select(columns).cast(own.schema)
    return pl.concat([own, extra.join(own, on="key", how="anti")])


def _other_lengths(entries: RecipeEntries, table: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """Rows whose entry cannot be as long as the table says."""
    tensor = entries.text_spec("").tensors[TEXT]
    most = tensor.shape[0]
    wrong = (
        pl.col("text_length").is_between(1, most).not_() if tensor.ragged else pl.col("text_length") != most
    )
    limit = f"{'at most ' if tensor.ragged else ''}{most}"
    for sample_id, length in table.filter(wrong).select("sample_id", "text_length").iter_rows():
        problem = f"its text embedding has {counted(length, 'token')}, expected: {limit}"
        yield {"sample_id": sample_id, "problem": problem}


def _out_of_step(
    entries: RecipeEntries, table: pl.DataFrame, asked: pl.DataFrame, validated: pl.DataFrame
) -> Iterator[dict[str, Any]]:
    """Samples that the table lacks, has too many, or has the entry of something else for."""
    names = ["sample_id", "variant"]
    same = table.select(*names, "caption").equals(validated.select(*names, "caption"))
    if same and not asked["about_bytes"].null_count():
        return
    keys = entries.text_requests(validated["caption"].unique().to_list()).select("caption", wanted="key")
    expected = validated.join(keys, on="caption").select(*names, "wanted")
    both = table.select(*names, "key").join(expected, on=names, how="full", coalesce=True)
    wrong = both.filter(~pl.col("key").eq_missing(pl.col("wanted"))).sort(names)
    for sample_id, variant, key, wanted in wrong.select(*names, "key", "wanted").iter_rows():
        it = f"variant {variant} of its caption" if variant else "it"
        if key is None:
            problem = f"{it} is in validated_dataset and not here"
        elif wanted is None:
            problem = f"{it} is not in validated_dataset"
        else:
            problem = "its entry was made for another caption, model or setting"
        yield {"sample_id": sample_id, "problem": problem}


def _captions_fit(entries: RecipeEntries, table: pl.DataFrame) -> Outcome:
    """Captions longer than the encoder takes, with what it never sees."""
    cut = (
        table.filter(pl.col("num_cut") > 0).sort("num_cut", "sample_id", descending=[True, False]).to_dicts()
    )
    numbers = {"samples": len(table), "cut": len(cut), "max_length": entries.family.max_length()}
    if not cut:
        return Outcome(True, f"all captions fit into {numbers['max_length']} tokens", numbers=numbers)
    shown = [
        {
            "sample_id": row["sample_id"],
            "num_tokens": row["num_tokens"],
            "num_cut": row["num_cut"],
            "cut_part": _cut_part(entries, row["caption"]) if index < MAX_ROWS else "",
        }
        for index, row in enumerate(cut)
    ]
    summary = f"{len(cut):,} of {counted(len(table), 'caption')} {verb(len(cut), 'is', 'are')} cut after "
    summary += f"{numbers['max_length']} tokens; of {cut[0]['sample_id']}, "
    summary += counted(cut[0]["num_cut"], "token is", "tokens are") + " never seen"
    fix = "shorten these captions, or put what matters first"
    return Outcome(False, summary, fix, shown, numbers)


def _cut_part(entries: RecipeEntries, caption: str) -> str:
    """The end of the caption that the encoder never sees, as its entry recorded it."""
    metadata = entries.store.check(entries.text_spec(caption)).metadata
    return "" if metadata is None or metadata["cut_from"] is None else caption[metadata["cut_from"] :]
