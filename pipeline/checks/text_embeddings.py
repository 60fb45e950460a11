"""The checks of text_embeddings: every caption there, of the encoders' shapes, of exact size, and finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.checks.base import MAX_ROWS, CheckContext, Finding, Outcome, findings
from pipeline.checks.cache_entries import Problems, Wanted
from pipeline.entries import Entries, recorded_stat

STAGE = "text_embeddings"


def run(context: CheckContext) -> list[Finding]:
    """One finding for each check of text_embeddings, from the tables, the store and the base model's files.

    Raises:
        TableError: There is no table of validated_dataset or text_embeddings.
        ModelError: The recipe's base model cannot be found, or is of no known family.
        StoreError: An entry may not be read.
    """
    rows = context.tables.read(STAGE).to_dicts()
    validated = context.tables.read("validated_dataset").select("sample_id", "caption")
    entries = Entries(context.recipe)
    captions: dict[str, str] = dict(validated.iter_rows())
    keys = {caption: entries.text(caption).key for caption in set(captions.values())}
    problems = Problems(entries.store, _wanted(context, entries, rows))
    count = f"{problems.num_entries:,} entries"
    outcomes = {
        "completeness": problems.outcome(
            "completeness",
            f"each of {len(captions):,} samples and the empty caption has its entry",
            more=list(_out_of_step(rows, {name: keys[caption] for name, caption in captions.items()})),
        ),
        "shape_uniformity": problems.outcome(
            "shape_uniformity", f"{count} of the shapes that the encoders' configurations say"
        ),
        "file_size_outliers": problems.outcome("file_size_outliers", f"{count} of exactly the right bytes"),
        "finite_values": problems.outcome("finite_values", f"{count} with sound content"),
        "captions_fit": _captions_fit(entries, rows),
    }
    return findings(context, STAGE, outcomes)


def _wanted(context: CheckContext, entries: Entries, rows: list[dict[str, Any]]) -> Iterator[Wanted]:
    """Each distinct entry of the table, and those that belong to no sample."""
    seen: set[str] = set()
    for row in rows:
        spec = entries.text(row["caption"])
        if spec.key == row["key"] and spec.key not in seen:
            seen.add(spec.key)
            yield Wanted(row["sample_id"], spec, recorded_stat(row))
    for caption in ("", *context.recipe.training.sample_prompts):
        spec = entries.text(caption)
        if spec.key not in seen:
            seen.add(spec.key)
            yield Wanted(f"the sample prompt {caption!r}" if caption else "the empty caption", spec, None)


def _out_of_step(rows: list[dict[str, Any]], expected: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Samples that the table lacks, has too many, or has the entry of something else for."""
    keys = {row["sample_id"]: row["key"] for row in rows}
    for sample_id in sorted(expected.keys() | keys.keys()):
        if sample_id not in keys:
            yield {"sample_id": sample_id, "problem": "it is in validated_dataset and not here"}
        elif sample_id not in expected:
            yield {"sample_id": sample_id, "problem": "it is not in validated_dataset"}
        elif keys[sample_id] != expected[sample_id]:
            problem = "its entry was made for another caption, model or setting"
            yield {"sample_id": sample_id, "problem": problem}


def _captions_fit(entries: Entries, rows: list[dict[str, Any]]) -> Outcome:
    """Captions longer than the encoder takes, with what it never sees."""
    cut = sorted((row for row in rows if row["num_cut"] > 0), key=lambda row: -row["num_cut"])
    numbers = {"samples": len(rows), "cut": len(cut), "max_length": entries.family.max_length()}
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
    summary = f"{len(cut):,} of {len(rows):,} captions are cut after {numbers['max_length']} tokens; "
    summary += f"of {cut[0]['sample_id']}, {cut[0]['num_cut']:,} tokens are never seen"
    fix = "shorten these captions, or put what matters first"
    return Outcome(False, summary, fix, shown, numbers)


def _cut_part(entries: Entries, caption: str) -> str:
    """The end of the caption that the encoder never sees, as its entry recorded it."""
    metadata = entries.store.check(entries.text(caption)).metadata
    return "" if metadata is None or metadata["cut_from"] is None else caption[metadata["cut_from"] :]
