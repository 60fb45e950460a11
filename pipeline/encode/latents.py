"""The stage vae_latents: a latent in the store for each image of aspect_buckets. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline import tables as table_files
from pipeline.encode.missing import Made, Maker, trusted_stats
from pipeline.encode.order import Job
from pipeline.entries import Entries, stat_columns
from pipeline.geometry import Geometry
from pipeline.launching import Launch
from pipeline.reports import Log, StageResult, Stopwatch
from pipeline.store import EntrySpec

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

    from pipeline.recipe import Recipe
    from pipeline.tables import Tables

ASSET = "vae_latents"

Row = Mapping[str, Any]


def cache_latents(
    recipe: Recipe, buckets: pl.DataFrame, tables: Tables, *, launch: Launch, log: Log
) -> StageResult:
    """A valid latent for each row of `buckets`, or the row's rejection.

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
    entries = Entries(recipe)
    rows = buckets.to_dicts()
    specs = [entries.latent(row) for row in rows]
    folders = {dataset.name: dataset.path for dataset in recipe.datasets}
    wanted = {spec.key: (spec, row) for row, spec in zip(rows, specs, strict=True)}
    previous = tables.read_previous(ASSET)
    known = previous.to_dicts() if previous is not None else []

    def job(spec: EntrySpec) -> Job:
        row = wanted[spec.key][1]
        return _job(entries, folders[row["dataset"]], row, spec)

    made = Maker(entries, "latents", launch, log=log, watch=watch).make(
        [spec for spec, _ in wanted.values()], job, trusted=trusted_stats(known), settings=_settings(recipe)
    )
    kept = [_kept(row, spec, made) for row, spec in zip(rows, specs, strict=True) if spec.key in made.states]
    lost = [_lost(row, spec, made) for row, spec in zip(rows, specs, strict=True) if spec.key in made.failed]
    removed = {row["key"] for row in known} - {row["key"] for row in kept}
    report = {
        **made.counters(removed),
        "samples": len(kept),
        "in": len(rows),
        "kept": len(kept),
        "rejected": len(lost),
        "bytes": sum(state.stat.num_bytes for state in made.states.values() if state.stat),
        **watch.numbers(),
    }
    return StageResult(table_files.frame(ASSET, kept), table_files.frame("rejected", lost), report)


def _settings(recipe: Recipe) -> dict[str, Any]:
    latents = recipe.latents
    return {
        "compute_dtype": latents.compute_dtype,
        "posterior": latents.posterior,
        "background": list(latents.background),
    }


def _job(entries: Entries, dataset_path: Path, row: Row, spec: EntrySpec) -> Job:
    geometry = Geometry.from_row(row)
    facts = {
        "inputs": dict(vars(entries.latent_inputs(row))),
        "original_size": list(geometry.original_size),
        "resized_size": list(geometry.resized_size),
        "crop": list(geometry.crop),
    }
    columns = ("height", "width", "resized_height", "resized_width")
    columns += ("crop_top", "crop_left", "target_height", "target_width", "content_hash")
    work = {"path": str(dataset_path / row["path"]), **{name: row[name] for name in columns}}
    cost = geometry.target_size.height * geometry.target_size.width
    return Job(spec, facts, work, row["sample_id"], cost)


def _kept(row: Row, spec: EntrySpec, made: Made) -> dict[str, Any]:
    stat = made.states[spec.key].stat
    assert stat is not None
    channels, height, width = spec.tensors["latent"].shape
    added = {
        "latent_channels": channels,
        "latent_height": height,
        "latent_width": width,
        "key": spec.key,
        "dtype": spec.tensors["latent"].dtype,
        **stat_columns(stat),
    }
    return {name: {**row, **added}[name] for name in table_files.SCHEMAS[ASSET]}


def _lost(row: Row, spec: EntrySpec, made: Made) -> dict[str, Any]:
    added = {"stage": ASSET, **asdict(made.failed[spec.key])}
    return {name: {**row, **added}[name] for name in table_files.REJECTED}
