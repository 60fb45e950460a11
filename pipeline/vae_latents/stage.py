"""Stage vae_latents: a latent in the cache for each row of aspect_buckets.

`latent_requests` -> `fill` (missing entries are encoded) -> rejected samples and table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.earlier_entries import register_earlier, unregister_earlier
from pipeline.cache.recipe_entries import LATENT_SHAPE, STAT_COLUMNS, TARGET, RecipeEntries, with_recorded
from pipeline.cache.reference_entries import KEYS, STATS_TEXT, of_references
from pipeline.cache.store import EntrySpec
from pipeline.encoding.fill import EntryRequests, FillResult, fill
from pipeline.encoding.jobs import Failure, Job, PictureJobs
from pipeline.images.geometry import Geometry, Size
from pipeline.models.reference_support import require_references
from pipeline.processes.launch import Launch
from pipeline.reporting.reports import Log, StageResult, Stopwatch
from pipeline.storage.tables import REJECTED, columns_in, frame, row_names, validated
from pipeline.vae_latents import report as pictures
from pipeline.vae_latents.masks import cache_masks, mask_counters
from pipeline.vae_latents.references import (
    failures_by_row,
    recorded_references,
    reference_counters,
    requested_references,
    with_reference_columns,
    without_refused,
)

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
        RecipeError: The base model does not see the recipe's references.
        StoreError: The cache cannot be read or written.
        LatentlineError: See `Launch`.
    """
    watch = Stopwatch()
    entries = RecipeEntries(recipe, log=log)
    require_references(recipe, entries.family)

    # One row per (sample, bucket, mirrored); several rows may share an entry.
    requests, refused = without_refused(entries, entries.latent_requests(buckets))
    requests, masks = cache_masks(entries, requests, tables, log=log, watch=watch)
    references = requested_references(entries, requests)
    previous = _recorded(tables.read_previous(ASSET, ("key", *STAT_COLUMNS, KEYS, STATS_TEXT)))
    latent_rows = _entry_rows(requests, previous)
    picture_rows = pictures.sample_of(latent_rows, pictures.NUM_DECODED)
    work = _entry_requests(entries, _with_references(latent_rows, references, previous), picture_rows)

    register_earlier(entries, "latents", None if previous is None else previous["key"], work.rows["key"])
    result = fill(entries, work, launch=launch, log=log, watch=watch)
    unregister_earlier(entries, ("latents", "masks"))

    failures = result.failed | ({} if masks is None else masks.failed)
    failed_references = failures_by_row(references, failures)
    requests = with_reference_columns(recipe, requests, references, result.entries)
    kept, failed = _without_failed(requests.with_row_index("row"), failures, failed_references)
    table = _table(kept, result)
    failed_rows = [_rejected_row(row, failures, failed_references) for row in failed.iter_rows(named=True)]

    report = {
        **_counters(result, table, removed=_num_removed(previous, _recorded(table))),
        **({} if masks is None else mask_counters(masks, table)),
        **({} if references.is_empty() else reference_counters(references, table)),
        "in": buckets["sample_id"].n_unique(),
        "rejected": len(failed_rows) + len(refused),
        **watch.numbers(),
        "pictures_seconds": round(watch.aside_s, 3),
        **_picture_report(entries, table, picture_rows),
    }
    return StageResult(table, frame("rejected", failed_rows + refused), report)


def _picture_report(entries: RecipeEntries, table: pl.DataFrame, rows: pl.DataFrame) -> dict[str, object]:
    """Draw the latents of `rows` and the statistics of all latents, and return their counters."""
    folder = entries.recipe.output_dir / "reports" / ASSET
    return {**pictures.report(folder, rows), **pictures.statistics(entries, table, folder)}


def _table(requests: pl.DataFrame, result: FillResult) -> pl.DataFrame:
    """Return the table vae_latents: the requests with the facts of their entries."""
    rows = requests.join(result.entries, on="key", maintain_order="left")
    rows = rows.select(*columns_in(ASSET, rows))
    return validated(ASSET, rows, "result of vae_latents").sort(row_names(ASSET))


def _without_failed(
    requests: pl.DataFrame, failures: Mapping[str, Any], failed_references: Mapping[int, Any]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows of samples whose entries are all present, and one row of each other sample.

    A failed entry rejects every sample that needs it.
    """
    keys = [name for name in ("key", "mask_key") if name in requests.columns]
    failed = requests.filter(
        pl.any_horizontal(pl.col(keys).is_in(list(failures))) | pl.col("row").is_in(list(failed_references))
    )
    failed = failed.unique("sample_id", keep="first", maintain_order=True)
    return requests.join(failed, on="sample_id", how="anti", maintain_order="left"), failed


def _recorded(table: pl.DataFrame | None) -> pl.DataFrame | None:
    """Return `key` and `STAT_COLUMNS` of all entries that a table recorded, with those of references."""
    if table is None:
        return None
    return pl.concat([table.select("key", *STAT_COLUMNS), recorded_references(table)])


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


def _with_references(
    latent_rows: pl.DataFrame, references: pl.DataFrame, previous: pl.DataFrame | None
) -> pl.DataFrame:
    """Add the rows of the references' entries. An entry that is also a latent of a sample stays one row."""
    if references.is_empty():
        return latent_rows
    rows = _entry_rows(references, previous)
    more = references.unique("key", keep="first").select("key", "root", "posterior")
    rows = rows.join(more, on="key", how="left", maintain_order="left")
    return pl.concat([latent_rows, rows], how="diagonal").unique("key", keep="first", maintain_order=True)


def _entry_requests(entries: RecipeEntries, rows: pl.DataFrame, picture_rows: pl.DataFrame) -> EntryRequests:
    recipe, references = entries.recipe, of_references(entries)
    roots = {dataset.name: str(dataset.root) for dataset in recipe.datasets}

    def job(row: Row) -> Job:
        if row.get("posterior") is not None:
            return _job(references, row["root"], row, {"posterior": row["posterior"]})
        return _job(entries, roots[row["dataset"]], row)

    def spec(row: Row) -> EntrySpec:
        target_size = Size(*(row[name] for name in TARGET))
        owner = entries if row.get("posterior") is None else references
        return EntrySpec("latents", row["key"], owner.latent_tensors(target_size))

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


def _job(entries: RecipeEntries, root: str, row: Row, more_work: Row = MappingProxyType({})) -> Job:
    geometry = Geometry.from_row(row)
    facts = {
        "inputs": dict(vars(entries.latent_inputs(row))),
        "original_size": list(geometry.original_size),
        "resized_size": list(geometry.resized_size),
        "crop": list(geometry.crop),
    }
    work = {"root": root, "path": row["path"], **{name: row[name] for name in _WORK}}
    name = f"the reference {row['path']} of {row['sample_id']}" if more_work else row["sample_id"]
    return Job(entries.latent_spec(row), facts, {**work, **more_work}, name, row["cost"])


def _num_removed(previous: pl.DataFrame | None, recorded: pl.DataFrame | None) -> int:
    """Count the keys of the previous table that the new one lacks."""
    if previous is None or recorded is None:
        return 0
    keys = previous.select("key").unique()
    return len(keys.join(recorded, on="key", how="anti"))


def _counters(result: FillResult, table: pl.DataFrame, removed: int) -> dict[str, int]:
    samples = table["sample_id"].n_unique()
    tiled = result.entries.drop_nulls("tile_px").filter(pl.col("key").is_in(list(result.encoded)))
    return {**result.counters(removed), "samples": samples, "kept": samples, "tiled": len(tiled)}


def _rejected_row(
    row: Row, failures: Mapping[str, Failure], failed_references: Mapping[int, Row]
) -> dict[str, Any]:
    failed_keys = [row[name] for name in ("key", "mask_key") if row.get(name) in failures]
    failure = asdict(failures[failed_keys[0]]) if failed_keys else failed_references[row["row"]]
    values = {**row, "stage": ASSET, **failure}
    return {name: values[name] for name in REJECTED}
