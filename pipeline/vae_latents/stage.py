"""The stage vae_latents: a latent in the store for each image of aspect_buckets. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.requests import LATENT_SHAPE, STAT_COLUMNS, TARGET, RecipeEntries, with_recorded
from pipeline.cache.store import EntrySpec
from pipeline.encoding.fill import Made, Maker, Wanted
from pipeline.encoding.jobs import Beside, Job
from pipeline.images.geometry import Geometry, Size
from pipeline.processes.launch import Launch
from pipeline.reporting.reports import Log, StageResult, Stopwatch
from pipeline.storage import tables as table_files
from pipeline.storage.columns import first_of_each, joined, num_beyond, num_distinct, with_one_of
from pipeline.vae_latents import report as decoded

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.storage.tables import Tables

ASSET = "vae_latents"

Row = Mapping[str, Any]


def cache_latents(
    recipe: Recipe, buckets: pl.DataFrame, tables: Tables, *, launch: Launch, log: Log
) -> StageResult:
    """A valid latent for each row of `buckets`, and its mirrored one if the recipe says so; or a rejection.

    Images of the same content and geometry share one entry. Nothing is launched when nothing is missing.

    Args:
        recipe: Its `latents` settings and base model decide the keys.
        buckets: Table aspect_buckets.
        tables: Where the last table is found: its entries are trusted as long as their stat is unchanged.
        launch: Starts the encoder.
        log: Told what is missing and damaged.

    Returns:
        Table vae_latents; the images that could not be encoded; counters of entries.

    Raises:
        ModelError: The base model cannot be found.
        StoreError: The cache cannot be read or written.
        LatentlineError: As `Launch`.
    """
    watch = Stopwatch()
    entries = RecipeEntries(recipe)
    rows = entries.latent_requests(buckets)
    roots = {dataset.name: str(dataset.root) for dataset in recipe.datasets}

    def job(row: Row) -> Job:
        return _job(entries, roots[row["dataset"]], row)

    asked, unwanted = _to_look_at(rows, tables)
    looked_at = decoded.sample_of(asked, decoded.NUM_DECODED)
    pictures = recipe.output_dir / "reports" / ASSET
    wanted = Wanted(
        asked,
        spec=lambda row: EntrySpec("latents", row["key"], entries.latent_tensors(_target(row))),
        job=job,
        facts={"tile_px": lambda state: (state.metadata or {}).get("tile_px")},
        beside=Beside(pictures, [job(row) for row in looked_at.iter_rows(named=True)]),
    )
    maker = Maker(entries, "latents", launch, log=log, watch=watch)
    made = maker.make(wanted, settings=_settings(recipe))
    failed = with_one_of(rows, made.failed, on="key").unique("sample_id", keep="first")
    kept = joined(table_files.without(rows, failed), made.entries, on="key")
    lost = [_lost(row, made) for row in failed.iter_rows(named=True)]
    table = table_files.validated(ASSET, kept.select(*table_files.SCHEMAS[ASSET]), "what vae_latents made")
    recorded = asked["key"].filter(asked[STAT_COLUMNS[0]].is_not_null())
    report = {
        **_counters(made, table, removed=unwanted + num_beyond(recorded, table["key"])),
        "in": num_distinct(buckets["sample_id"]),
        "rejected": len(lost),
        **watch.numbers(),
        "pictures_seconds": round(watch.aside_s, 3),
        **decoded.report(pictures, looked_at),
        **decoded.statistics(entries, table, pictures),
    }
    ordered = table_files.in_order(table, ["sample_id", "bucket", "flipped"])
    return StageResult(ordered, table_files.frame("rejected", lost), report)


def _counters(made: Made, table: pl.DataFrame, removed: int) -> dict[str, int]:
    """The report's numbers of entries, and of the samples in the new table."""
    samples = num_distinct(table["sample_id"])
    tiled = with_one_of(made.entries.drop_nulls("tile_px"), made.encoded, on="key")
    return {**made.counters(removed), "samples": samples, "kept": samples, "tiled": len(tiled)}


_WORK = ("height", "width", "resized_height", "resized_width", "crop_top", "crop_left", *TARGET)
"""Columns of a row that the encoder is told, with `content_hash` and `flipped`."""


def _to_look_at(rows: pl.DataFrame, tables: Tables) -> tuple[pl.DataFrame, int]:
    """Of each key the first row, with what `Wanted` and `_job` need.

    Beside it: how many entries of the last table are not wanted any more.
    """
    named = ("key", "num_bytes", "sample_id", "dataset", "path", "content_hash", "flipped")
    known = tables.read_previous(ASSET, ("key", *STAT_COLUMNS))
    asked = first_of_each(rows, on="key").select(
        *named,
        *_WORK,
        *LATENT_SHAPE,
        about_bytes="num_bytes",
        name="sample_id",
        cost=pl.col(TARGET[0]).cast(pl.Int64) * pl.col(TARGET[1]),
    )
    unwanted = 0 if known is None else num_beyond(known["key"], asked["key"])
    return with_recorded(asked, known), unwanted


def _target(row: Row) -> Size:
    return Size(*(row[name] for name in TARGET))


def _settings(recipe: Recipe) -> dict[str, Any]:
    latents = recipe.latents
    return {
        "compute_dtype": latents.compute_dtype,
        "posterior": latents.posterior,
        "background": list(latents.background),
    }


def _job(entries: RecipeEntries, root: str, row: Row) -> Job:
    geometry, spec = Geometry.from_row(row), entries.latent_spec(row)
    facts = {
        "inputs": dict(vars(entries.latent_inputs(row))),
        "original_size": list(geometry.original_size),
        "resized_size": list(geometry.resized_size),
        "crop": list(geometry.crop),
    }
    columns = (*_WORK, "content_hash", "flipped")
    work = {"root": root, "path": row["path"], **{name: row[name] for name in columns}}
    return Job(spec, facts, work, row["sample_id"], row["cost"])


def _lost(row: Row, made: Made) -> dict[str, Any]:
    added = {"stage": ASSET, **asdict(made.failed[row["key"]])}
    return {name: {**row, **added}[name] for name in table_files.REJECTED}
