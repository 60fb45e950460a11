"""Stage vae_latents: a latent in the cache for each row of aspect_buckets.

`latent_requests` -> `fill` (missing entries are encoded) -> rejected samples and table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.requests import LATENT_SHAPE, STAT_COLUMNS, TARGET, RecipeEntries, with_recorded
from pipeline.cache.store import EntrySpec
from pipeline.encoding.fill import EntryRequests, FillResult, fill
from pipeline.encoding.jobs import Failure, Job, PictureJobs
from pipeline.images.geometry import Geometry, Size
from pipeline.processes.launch import Launch
from pipeline.reporting.reports import Log, StageResult, Stopwatch
from pipeline.storage.tables import REJECTED, columns_in, frame, row_names, validated
from pipeline.vae_latents import report as pictures
from pipeline.vae_latents.masks import cache_masks, mask_counters

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.storage.tables import Tables

ASSET = "vae_latents"

Row = Mapping[str, Any]

_WORK = (
    *("height", "width", "resized_height", "resized_width", "crop_top", "crop_left"),
    *("target_height", "target_width", "content_hash", "flipped"),
)
"""Columns of a row that the encoder receives."""


def cache_latents(
    recipe: Recipe, buckets: pl.DataFrame, tables: Tables, *, launch: Launch, log: Log
) -> StageResult:
    """Bring the latents of all rows of `buckets` up to date, with mirrored ones if the recipe enables them.

    Images of equal content and geometry share an entry. A sample is rejected if one of its entries cannot be
    encoded. Nothing is launched if nothing is missing.

    Args:
        recipe: Recipe whose `latents` settings and base model decide the keys.
        buckets: Table aspect_buckets.
        tables: Tables of earlier runs; entries whose stat is as recorded there are trusted.
        launch: Starts the encoding processes.
        log: Receives a summary of missing and damaged entries.

    Returns:
        Table vae_latents, the rejected samples, and counters of entries.

    Raises:
        ModelError: The base model cannot be found.
        StoreError: The cache cannot be read or written.
        LatentlineError: See `Launch`.
    """
    watch = Stopwatch()
    entries = RecipeEntries(recipe, log=log)

    # One row per (sample, bucket, mirrored); several rows may share an entry.
    requests = entries.latent_requests(buckets)
    requests, masks = cache_masks(entries, requests, tables, log=log, watch=watch)
    previous = tables.read_previous(ASSET, ("key", *STAT_COLUMNS))
    entry_rows = _entry_rows(requests, previous)
    picture_rows = pictures.sample_of(entry_rows, pictures.NUM_DECODED)
    folder = recipe.output_dir / "reports" / ASSET

    result = fill(
        entries,
        _entry_requests(entries, entry_rows, picture_rows),
        launch=launch,
        log=log,
        watch=watch,
    )

    failures = result.failed | ({} if masks is None else masks.failed)
    kept, failed = _without_failed(requests, failures)
    table = kept.join(result.entries, on="key", maintain_order="left")
    table = table.select(*columns_in(ASSET, table))
    table = validated(ASSET, table, "result of vae_latents").sort(row_names(ASSET))
    rejected = frame("rejected", [_rejected_row(row, failures) for row in failed.iter_rows(named=True)])

    report = {
        **_counters(result, table, removed=_num_removed(previous, table)),
        **({} if masks is None else mask_counters(masks, table)),
        "in": buckets["sample_id"].n_unique(),
        "rejected": len(rejected),
        **watch.numbers(),
        "pictures_seconds": round(watch.aside_s, 3),
        **pictures.report(folder, picture_rows),
        **pictures.statistics(entries, table, folder),
    }
    return StageResult(table, rejected, report)


def _without_failed(requests: pl.DataFrame, failures: Mapping[str, Any]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows of samples whose entries are all present, and one row of each other sample.

    A failed entry rejects every sample that needs it.
    """
    keys = [name for name in ("key", "mask_key") if name in requests.columns]
    failed = requests.filter(pl.any_horizontal(pl.col(keys).is_in(list(failures))))
    failed = failed.unique("sample_id", keep="first", maintain_order=True)
    return requests.join(failed, on="sample_id", how="anti", maintain_order="left"), failed


def _entry_rows(requests: pl.DataFrame, previous: pl.DataFrame | None) -> pl.DataFrame:
    """Return the first row of each key, with the columns of `EntryRequests.rows`."""
    area = pl.col("target_height").cast(pl.Int64) * pl.col("target_width")
    rows = requests.unique("key", keep="first", maintain_order=True).select(
        *("key", "num_bytes", "sample_id", "dataset", "path"),
        *_WORK,
        *LATENT_SHAPE,
        about_bytes="num_bytes",
        name="sample_id",
        cost=area,
    )
    return with_recorded(rows, previous)


def _entry_requests(entries: RecipeEntries, rows: pl.DataFrame, picture_rows: pl.DataFrame) -> EntryRequests:
    recipe = entries.recipe
    roots = {dataset.name: str(dataset.root) for dataset in recipe.datasets}

    def job(row: Row) -> Job:
        return _job(entries, roots[row["dataset"]], row)

    def spec(row: Row) -> EntrySpec:
        target_size = Size(*(row[name] for name in TARGET))
        return EntrySpec("latents", row["key"], entries.latent_tensors(target_size))

    return EntryRequests(
        kind="latents",
        rows=rows,
        settings={
            "compute_dtype": entries.vae_compute_dtype,
            "posterior": recipe.latents.posterior,
            "background": list(recipe.latents.background),
            "max_file_bytes": recipe.checks.max_file_bytes,
        },
        spec=spec,
        job=job,
        facts={"tile_px": lambda state: (state.metadata or {}).get("tile_px")},
        pictures=PictureJobs(
            recipe.output_dir / "reports" / ASSET, [job(row) for row in picture_rows.iter_rows(named=True)]
        ),
    )


def _job(entries: RecipeEntries, root: str, row: Row) -> Job:
    geometry = Geometry.from_row(row)
    facts = {
        "inputs": dict(vars(entries.latent_inputs(row))),
        "original_size": list(geometry.original_size),
        "resized_size": list(geometry.resized_size),
        "crop": list(geometry.crop),
    }
    work = {"root": root, "path": row["path"], **{name: row[name] for name in _WORK}}
    return Job(entries.latent_spec(row), facts, work, row["sample_id"], row["cost"])


def _num_removed(previous: pl.DataFrame | None, table: pl.DataFrame) -> int:
    """Count the keys of the previous table that the new one lacks."""
    if previous is None:
        return 0
    keys = previous.select("key").unique()
    return len(keys.join(table, on="key", how="anti"))


def _counters(result: FillResult, table: pl.DataFrame, removed: int) -> dict[str, int]:
    samples = table["sample_id"].n_unique()
    tiled = result.entries.drop_nulls("tile_px").filter(pl.col("key").is_in(list(result.encoded)))
    return {**result.counters(removed), "samples": samples, "kept": samples, "tiled": len(tiled)}


def _rejected_row(row: Row, failures: Mapping[str, Failure]) -> dict[str, Any]:
    failure = failures[row["key"] if row["key"] in failures else row["mask_key"]]
    values = {**row, "stage": ASSET, **asdict(failure)}
    return {name: values[name] for name in REJECTED}
