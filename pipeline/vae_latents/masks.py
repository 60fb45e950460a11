"""Masks of vae_latents: an entry for the mask of each latent, encoded in this process without a model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.entry_format import MASK
from pipeline.cache.recipe_entries import STATS, RecipeEntries, with_recorded
from pipeline.cache.store import Store
from pipeline.encoding.fill import EntryRequests, FillResult, fill
from pipeline.encoding.jobs import Encoded, Failure, Job, Outcome, ResultsWriter, read_encoding
from pipeline.images.decoder_warnings import counted_warnings
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Geometry, Size
from pipeline.images.mask import load_mask, mask_weights
from pipeline.raw_images.parallel import in_threads
from pipeline.side_inputs import MASKS
from pipeline.side_inputs.masks import MEAN
from pipeline.side_inputs.side_input import GEOMETRY
from pipeline.storage.addresses import address
from pipeline.storage.remote_source import source_at

if TYPE_CHECKING:
    from pipeline.log import Log
    from pipeline.processes.launch import Launch, Meanwhile
    from pipeline.recipe import Recipe
    from pipeline.reporting.reports import Stopwatch

Row = Mapping[str, Any]

PPM = 1_000_000

_WORK = (*GEOMETRY, "flipped", "path", "content_hash")
"""Columns of an entry row that the encoder receives."""


def cache_masks(
    entries: RecipeEntries,
    masks: pl.DataFrame,
    recorded: pl.DataFrame,
    *,
    log: Log,
    watch: Stopwatch,
    seal_packs: bool = False,
) -> FillResult | None:
    """Bring the entries of all masks up to date; return None if the recipe has no masks.

    `masks` are `MASKS.entry_rows` of all rows of vae_latents, and `recorded` is `MASKS.recorded` of the
    previous table; entries with the stat recorded there are trusted.
    """
    recipe = entries.recipe
    if not MASKS.numbers(recipe):
        return None
    requests = replace(_entry_requests(entries, masks, recorded), seal_packs=seal_packs)
    return fill(entries, requests, launch=_encode_here(recipe, log), log=log, watch=watch)


def mask_counters(result: FillResult) -> dict[str, int]:
    """Return the report's counters of mask entries."""
    counters = result.counters(0)
    return {f"masks_{name}": counters[name] for name in ("encoded", "reused", "failed", "damaged")}


def kept_fraction() -> pl.Expr:
    """Return the fraction of a mask's weight that is inside the crop, over rows of vae_latents."""
    target = pl.col("target_height").cast(pl.Float64) * pl.col("target_width")
    resized = pl.col("resized_height").cast(pl.Float64) * pl.col("resized_width")
    return pl.col(MEAN) / PPM * target / resized / pl.col("mask_mean")


def _entry_requests(entries: RecipeEntries, masks: pl.DataFrame, recorded: pl.DataFrame) -> EntryRequests:
    roots = {
        dataset.name: str(root)
        for dataset in entries.recipe.datasets
        for root in dataset.side_input_roots(MASKS.recipe_key)
    }
    sources = MASKS.sources(entries.recipe)

    def job(row: Row) -> Job:
        work = {name: row[name] for name in _WORK}
        work |= {"root": roots[row["dataset"]], "source": sources[row["dataset"]]}
        facts = {"inputs": MASKS.inputs(entries, row)}
        return Job(MASKS.spec(entries, row), facts, work, MASKS.entry_name(row), row["cost"])

    # Mirrored and repeated samples may share a mask and a geometry, and so an entry.
    rows = MASKS.with_num_bytes(entries, masks.unique("key", keep="first", maintain_order=True))
    rows = rows.with_columns(about_bytes="num_bytes", name="sample_id", cost=pl.lit(1, pl.Int64))
    return EntryRequests(
        kind=MASKS.kind,
        rows=with_recorded(rows, recorded, {**STATS, MEAN: pl.Int32}),
        settings={"max_file_bytes": entries.recipe.checks.max_file_bytes},
        spec=partial(MASKS.spec, entries),
        job=job,
        facts={MEAN: lambda state: (state.metadata or {}).get(MEAN)},
    )


def _encode_here(recipe: Recipe, log: Log) -> Launch:
    def launch(module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
        # The jobs are not written before `meanwhile` has found the missing entries.
        if meanwhile is not None:
            meanwhile()
        masks = read_encoding(job_file)
        store = Store(masks.store_root)
        limit = recipe.checks.max_file_bytes

        # A source is opened once per folder, because an address needs a connection.
        roots = {job.work["root"] for job in masks.jobs}
        sources = {root: source_at(address(root), max_file_bytes=limit) for root in roots}
        start_s = time.perf_counter()

        def encode(job: Job) -> None:
            outcome = _outcome(job, sources[job.work["root"]].file(job.work["path"]))
            if isinstance(outcome, Encoded):
                written = store.write(job.spec, outcome.tensors, {**job.facts, **outcome.facts})
                results.ended(job.spec.key, "made" if written else "present")
            else:
                results.ended(job.spec.key, outcome)

        with ResultsWriter(job_file, 0) as results, counted_warnings(log):
            for _ in in_threads(encode, list(masks.jobs), log=log, doing="masks encoded"):
                pass
            results.finish(time.perf_counter() - start_s)

    return launch


def _outcome(job: Job, file: Any) -> Outcome:
    work = job.work
    geometry = Geometry.from_row(work)
    try:
        values = load_mask(
            file, geometry, work["source"], flipped=work["flipped"], content_hash=work["content_hash"]
        )
    except ImageError as err:
        named = MASKS.error(err, file)
        return Failure(named.reason, named.detail, named.fix)

    # A mask that is black inside the crop would give the sample no loss at all.
    mean_ppm = round(float(values.mean()) / 255 * PPM)
    if not mean_ppm:
        detail = f"the mask is black where the crop to {geometry.bucket} (height x width) shows the image"
        fix = "set buckets.crop: focus, use more bucket sizes, or remove the image"
        return Failure("mask_cropped_away", detail, fix)
    size = Size(*job.spec.tensors[MASK].shape[1:])
    return Encoded({MASK: mask_weights(values, size)}, {MEAN: mean_ppm})
