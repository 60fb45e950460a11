"""Stage vae_latents: a latent in the cache for each row of aspect_buckets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.recipe_entries import LATENT_SHAPE, STAT_COLUMNS, TARGET, RecipeEntries, with_recorded
from pipeline.cache.store import EntrySpec
from pipeline.encoding.fill import EntryRequests, FillResult, fill
from pipeline.encoding.jobs import Failure, Job, PictureJobs
from pipeline.images.geometry import Geometry, Size
from pipeline.log import Log
from pipeline.models.recipe_support import require_references
from pipeline.processes.launch import Launch
from pipeline.raw_images.commits import at_scanned_commits
from pipeline.reporting.reports import StageResult, Stopwatch
from pipeline.side_inputs import MASKS, SIDE_INPUTS, SideInput
from pipeline.side_inputs.images import mean_entries
from pipeline.side_inputs.side_input import VIEW
from pipeline.storage.tables import (
    REJECTED,
    SIDE_INPUT_COLUMNS,
    columns_in,
    frame,
    row_names,
    validated,
)
from pipeline.vae_latents import report as pictures
from pipeline.vae_latents.masks import cache_masks, mask_counters
from pipeline.vae_latents.side_inputs import (
    VAE_SIDE_INPUTS,
    failures_by_row,
    recorded_images,
    requested_images,
    side_input_counters,
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

_RECORDED_COLUMNS = (
    *("key", *STAT_COLUMNS, *VIEW),
    *(name for columns in SIDE_INPUT_COLUMNS.values() for name in columns[ASSET]),
)
"""Columns of the last table that record its entries."""


def cache_latents(
    recipe: Recipe,
    buckets: pl.DataFrame,
    tables: Tables,
    *,
    launch: Launch,
    log: Log,
    seal_packs: bool = False,
) -> StageResult:
    """Bring the latents of all rows of `buckets` up to date, with mirrored ones if the recipe enables them.

    Nothing is launched if nothing is missing. Entries with the stat that earlier `tables` recorded are
    trusted. `seal_packs` copies new entries into packs.

    Raises:
        ModelError: The base model cannot be found.
        RecipeError: The base model does not see the recipe's references.
        StoreError: The cache cannot be read or written.
    """
    watch = Stopwatch()
    recipe = at_scanned_commits(recipe)
    entries = RecipeEntries(recipe, log=log)
    require_references(recipe, entries.family)

    # One row per (sample, bucket, mirrored); several rows may share an entry.
    requests, refused = without_refused(entries, entries.latent_requests(buckets))
    side_inputs = {side_input: side_input.entry_rows(entries, requests) for side_input in SIDE_INPUTS}
    previous = tables.read_previous(ASSET, _RECORDED_COLUMNS)

    # Masks need no model, so this process encodes them. Images of side inputs share the VAE's processes with
    # the latents, because loading the VAE takes longer than encoding many images.
    masks = cache_masks(
        entries,
        side_inputs[MASKS],
        MASKS.recorded(previous),
        log=log,
        watch=watch,
        seal_packs=seal_packs,
    )
    recorded = _recorded(previous)
    latents = _entry_rows(requests, recorded)
    picture_rows = pictures.choose(latents, pictures.num_decoded(len(latents)))
    requested = [rows for rows in requested_images(entries, side_inputs) if not rows.is_empty()]
    images = [_entry_rows(rows, recorded) for rows in requested]

    # An image of a side input may also be a sample, with the same entry; the entry stays one row.
    rows = latents
    if images:
        rows = pl.concat([latents, *images], how="diagonal").unique("key", keep="first", maintain_order=True)
    work = replace(_entry_requests(entries, rows, picture_rows), seal_packs=seal_packs)
    result = fill(entries, work, launch=launch, log=log, watch=watch)

    failed = result.failed | ({} if masks is None else masks.failed)
    kept, rejected = _without_failed(requests.with_row_index("row"), side_inputs, failed)
    for side_input, entry_rows in side_inputs.items():
        encoded = masks if side_input is MASKS else result
        kept = _with_side_input(recipe, side_input, kept, entry_rows, encoded)
    table = _table(kept, result)

    report = {
        **_counters(result, table, removed=_num_removed(recorded, _recorded(table))),
        **({} if masks is None else {MASKS.samples_counter: 0, **mask_counters(masks)}),
        **side_input_counters(side_inputs, table["sample_id"]),
        "in": buckets["sample_id"].n_unique(),
        "rejected": len(rejected) + len(refused),
        **watch.numbers(),
        "pictures_seconds": round(watch.aside_s, 3),
        **_picture_report(entries, table, picture_rows),
    }
    return StageResult(table, frame("rejected", rejected + refused), report)


def _picture_report(entries: RecipeEntries, table: pl.DataFrame, rows: pl.DataFrame) -> dict[str, object]:
    folder = entries.recipe.output_dir / "reports" / ASSET
    return {**pictures.report(folder, rows), **pictures.statistics(entries, table, folder)}


def _table(requests: pl.DataFrame, result: FillResult) -> pl.DataFrame:
    rows = requests.join(result.entries, on="key", maintain_order="left")
    rows = rows.select(*columns_in(ASSET, rows))
    return validated(ASSET, rows, "result of vae_latents").sort(row_names(ASSET))


def _with_side_input(
    recipe: Recipe,
    side_input: SideInput,
    requests: pl.DataFrame,
    entry_rows: pl.DataFrame,
    encoded: FillResult | None,
) -> pl.DataFrame:
    # The table of aspect_buckets may be older than the recipe, which has no such files now.
    if encoded is None or not side_input.numbers(recipe):
        return requests.drop(SIDE_INPUT_COLUMNS[side_input.plural][ASSET], strict=False)
    return side_input.with_entries(requests, entry_rows, encoded.entries)


def _without_failed(
    requests: pl.DataFrame, side_inputs: Mapping[SideInput, pl.DataFrame], failures: Mapping[str, Failure]
) -> tuple[pl.DataFrame, list[dict[str, Any]]]:
    """Return the requests of samples with all their entries, and the rejected rows of all other samples."""
    if not failures:
        return requests, []
    of_latents = requests.filter(pl.col("key").is_in(list(failures))).select("row", "key")
    by_row = failures_by_row(side_inputs, failures)

    # The failure of the latent replaces failures of side inputs as the reason of the rejection.
    by_row |= {row: asdict(failures[key]) for row, key in of_latents.iter_rows()}

    # A failed entry rejects every sample that needs it, with all its buckets.
    failed = requests.filter(pl.col("row").is_in(list(by_row)))
    failed = failed.unique("sample_id", keep="first", maintain_order=True)
    kept = requests.join(failed, on="sample_id", how="anti", maintain_order="left")
    return kept, [_rejected_row(row, by_row[row["row"]]) for row in failed.iter_rows(named=True)]


def _recorded(table: pl.DataFrame | None) -> pl.DataFrame | None:
    if table is None:
        return None
    return pl.concat([table.select("key", *STAT_COLUMNS), recorded_images(table)])


def _entry_rows(requests: pl.DataFrame, recorded: pl.DataFrame | None) -> pl.DataFrame:
    """Return the first row of each key, with the columns of `EntryRequests.rows`."""
    # The VAE's time is proportional to the area, which shares jobs evenly among processes.
    area = pl.col("target_height").cast(pl.Int64) * pl.col("target_width")
    optional = [name for name in ("root", "side_input", "decoding") if name in requests.columns]
    rows = requests.unique("key", keep="first", maintain_order=True).select(
        *("key", "num_bytes", "sample_id", "dataset", "path"),
        *_WORK,
        *LATENT_SHAPE,
        *optional,
        about_bytes="num_bytes",
        name="sample_id",
        cost=area,
    )
    return with_recorded(rows, recorded)


def _entry_requests(entries: RecipeEntries, rows: pl.DataFrame, picture_rows: pl.DataFrame) -> EntryRequests:
    recipe, of_mean = entries.recipe, mean_entries(entries)
    roots = {dataset.name: str(dataset.root) for dataset in recipe.datasets}
    images = {side_input.plural: side_input for side_input in VAE_SIDE_INPUTS}

    def job(row: Row) -> Job:
        if (name := row.get("side_input")) is None:
            return _job(entries, row, root=roots[row["dataset"]], name=row["sample_id"])
        made_from = images[name].entry_name(row)
        return _job(of_mean, row, root=row["root"], name=made_from, work={"posterior": "mean"})

    def spec(row: Row) -> EntrySpec:
        target_size = Size(*(row[name] for name in TARGET))

        # The pipelines do not sample images that the denoiser sees, so their entries hold the mean.
        owner = entries if row.get("side_input") is None else of_mean
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


def _job(entries: RecipeEntries, row: Row, *, root: str, name: str, work: Row = MappingProxyType({})) -> Job:
    geometry = Geometry.from_row(row)
    facts = {
        "inputs": dict(vars(entries.latent_inputs(row))),
        "original_size": list(geometry.original_size),
        "resized_size": list(geometry.resized_size),
        "crop": list(geometry.crop),
    }
    image = {"root": root, "path": row["path"], **{column: row[column] for column in _WORK}}
    return Job(entries.latent_spec(row), facts, {**image, **work}, name, row["cost"])


def _num_removed(previous: pl.DataFrame | None, recorded: pl.DataFrame | None) -> int:
    if previous is None or recorded is None:
        return 0

    # Rows of one table may share an entry, which counts once.
    return previous.join(recorded, on="key", how="anti")["key"].n_unique()


def _counters(result: FillResult, table: pl.DataFrame, removed: int) -> dict[str, int]:
    samples = table["sample_id"].n_unique()

    # Only of this run: a tiled entry of an earlier run is as valid as any other.
    tiled = result.entries.drop_nulls("tile_px").filter(pl.col("key").is_in(list(result.encoded)))
    return {**result.counters(removed), "samples": samples, "kept": samples, "tiled": len(tiled)}


def _rejected_row(row: Row, failure: Mapping[str, str]) -> dict[str, Any]:
    values = {**row, "stage": ASSET, **failure}
    return {name: values[name] for name in REJECTED}
