"""Stage text_embeddings: text embeddings in the cache for each distinct caption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.entry_format import TEXT
from pipeline.cache.recipe_entries import SEEN, STAT_COLUMNS, STATS, RecipeEntries
from pipeline.cache.store import EntrySpec, EntryState
from pipeline.encoding.fill import EntryRequests, fill
from pipeline.encoding.jobs import Failure, Job
from pipeline.errors import DatasetError
from pipeline.log import Log
from pipeline.models.recipe_support import require_preview_prompts
from pipeline.processes.launch import Launch
from pipeline.raw_images.commits import at_scanned_commits
from pipeline.reporting.reports import StageResult, Stopwatch
from pipeline.storage.tables import REJECTED, columns_in, frame, row_names, selected, validated
from pipeline.text_embeddings.caption_rows import CAPTION_COLUMNS, FILES, file_images, text_rows

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.storage.tables import Tables

ASSET = "text_embeddings"

_TOKEN_COUNTS = ("num_tokens", "num_cut")
"""Columns with values from an entry's metadata."""


def needed_captions(recipe: Recipe, captions: Iterable[str]) -> pl.Series:
    """Return the sorted distinct captions: these, the prompts of the previews, and the empty one."""
    # Dropout and guidance use the empty caption.
    texts = [*captions, *recipe.preview_captions, ""]
    return pl.Series("caption", texts, dtype=pl.String).unique().sort()


def needed_texts(entries: RecipeEntries, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the distinct captions in `rows`, the prompts of the previews, and the empty caption, sorted.

    `rows` are rows of `text_rows`, or of text_embeddings after `with_seen_images`. If the text encoder sees
    references, the result also has `SEEN` and `FILES`, and equal captions with different images are distinct.

    Raises:
        ImageError: A reference of a preview cannot be read.
    """
    if entries.text_images is None:
        return needed_captions(entries.recipe, rows["caption"]).to_frame()
    more: list[tuple[str, str | None, str | None]] = [("", None, None)]
    for each in entries.recipe.preview_prompts:
        images = file_images(entries, each.references)
        more.append((each.prompt, *images))

        # Some pipelines encode the negative prompt, which may be empty, with the images too.
        negative = each.negative_prompt or ""
        more.append((negative, *images) if entries.sees_images_in_negative else (negative, None, None))
    columns = ("caption", SEEN, FILES)
    of_recipe = pl.DataFrame(more, schema=dict.fromkeys(columns, pl.String), orient="row")
    texts = pl.concat([rows.select(columns), of_recipe])
    distinct = texts.unique(("caption", SEEN), keep="first", maintain_order=True)
    return distinct.sort("caption", SEEN)


def cache_text(
    recipe: Recipe,
    validated_table: pl.DataFrame,
    tables: Tables,
    *,
    launch: Launch,
    log: Log,
    seal_packs: bool = False,
) -> StageResult:
    """Bring the text embeddings of all captions, the empty one and the previews' prompts up to date.

    Nothing is launched if nothing is missing. Entries with the stat that earlier `tables` recorded are
    trusted. `seal_packs` copies new entries into packs. A sample with a reference that changed or cannot be
    read is rejected.

    Raises:
        DatasetError: A reference of a preview prompt cannot be used.
        ModelError: The base model cannot be found, or its encoder returns values that are not finite.
        RecipeError: A preview prompt does not suit the base model.
        StoreError: The cache cannot be read or written.
    """
    watch = Stopwatch()
    recipe = at_scanned_commits(recipe)
    entries = RecipeEntries(recipe, log=log)
    require_preview_prompts(recipe, entries.family)

    # One row per (sample, caption); samples with equal captions share an entry.
    captions = text_rows(entries, selected("validated_dataset", validated_table, CAPTION_COLUMNS))
    previous = tables.read_previous(ASSET, ("key", "text_length", *_TOKEN_COUNTS, *STAT_COLUMNS))
    requests = caption_requests(entries, needed_texts(entries, captions), previous)
    requests = replace(requests, seal_packs=seal_packs)
    result = fill(entries, requests, launch=launch, log=log, watch=watch)

    # `requests` has each of these captions once, with its images if the encoder sees any.
    texts = [name for name in ("caption", SEEN) if name in captions.columns]
    keys = requests.rows.select(*texts, "key")
    captions = captions.join(keys, on=texts, how="left", nulls_equal=True, maintain_order="left")
    captions = captions.with_columns(dtype=pl.lit(recipe.text.dtype))
    rejected = _rejected(captions, result.failed)
    table = captions.join(rejected, on="sample_id", how="anti", maintain_order="left")
    table = table.join(result.entries, on="key", maintain_order="left")
    table = table.select(*columns_in(ASSET, table))
    table = validated(ASSET, table, "result of text_embeddings").sort(row_names(ASSET))

    removed = 0
    if previous is not None:
        removed = previous.join(requests.rows, on="key", how="anti")["key"].n_unique()
    report = {
        **result.counters(removed),
        "samples": len(validated_table),
        "in": len(validated_table),
        "kept": len(validated_table) - len(rejected),
        "rejected": len(rejected),
        "captions_cut": int((table["num_cut"] > 0).sum()),
        **watch.numbers(),
    }
    return StageResult(table, rejected, report)


def _rejected(captions: pl.DataFrame, failures: Mapping[str, Failure]) -> pl.DataFrame:
    # A failure of a preview's reference has no sample to reject, so the recipe must be corrected.
    of_samples = set(captions["key"]) if failures else set[str]()
    of_previews = [failure for key, failure in failures.items() if key not in of_samples]
    if of_previews:
        first = of_previews[0]
        raise DatasetError(first.detail, where="training.sample_prompts", fix=first.fix)

    failed = captions.filter(pl.col("key").is_in(list(failures)))
    rows: list[dict[str, Any]] = []
    for row in failed.unique("sample_id", keep="first", maintain_order=True).iter_rows(named=True):
        values = {**row, "stage": ASSET, **asdict(failures[row["key"]])}
        rows.append({name: values.get(name) for name in REJECTED})
    return frame("rejected", rows)


def caption_requests(
    entries: RecipeEntries, texts: pl.DataFrame, previous: pl.DataFrame | None = None
) -> EntryRequests:
    """Return the requests of captions.

    Args:
        entries: Entries of the recipe.
        texts: One row per distinct caption: `caption`, and perhaps `SEEN` and `FILES`.
        previous: Last table of text_embeddings.
    """
    rows = entries.text_requests(
        texts["caption"],
        previous,
        STATS | dict.fromkeys(_TOKEN_COUNTS, pl.Int32),
        images=texts.get_column(SEEN, default=None),
    )
    if FILES in texts.columns:
        rows = rows.with_columns(texts[FILES])
    token_counts = {name: partial(_recorded_count, name) for name in _TOKEN_COUNTS}
    return EntryRequests(
        kind="text",
        rows=rows.with_columns(name="caption", cost=pl.lit(1, pl.Int32)),
        settings=text_settings(entries.recipe),
        spec=lambda row: EntrySpec("text", row["key"], entries.text_tensors()),
        job=lambda row: _job(entries, row),
        facts={**token_counts, "text_length": _text_length},
    )


def text_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of an `Encoding` of text embeddings."""
    return {
        "compute_dtype": recipe.text.compute_dtype,
        "offload": recipe.text.offload,
        "background": list(recipe.latents.background),
        "max_file_bytes": recipe.checks.max_file_bytes,
    }


def _recorded_count(name: str, state: EntryState) -> int:
    count = (state.metadata or {}).get(name)
    return -1 if count is None else count  # no entry of a caption is without its counts


def _text_length(state: EntryState) -> int | None:
    return state.shapes[TEXT][0] if state.shapes else None


def _job(entries: RecipeEntries, row: Mapping[str, Any]) -> Job:
    caption, images = row["caption"], row.get(SEEN)
    # A caption may be longer than an entry's header, so the header has its hash.
    inputs = entries.text_inputs(caption, images).values()
    inputs["caption"] = hashlib.sha256(caption.encode("utf-8")).hexdigest()
    name = f"the caption {caption[:60]!r}" if caption else "the empty caption"
    work: dict[str, Any] = {"caption": caption}
    if images is not None:
        work["images"] = json.loads(row[FILES])
        name += f" with {', '.join(each['path'] for each in work['images'])}"
    return Job(entries.text_spec(caption, images=images), {"inputs": inputs}, work, name, 1)
