"""Masks of vae_latents: an entry for the mask of each latent, encoded in this process without a model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.earlier_entries import register_earlier
from pipeline.cache.entry_format import MASK
from pipeline.cache.mask_entries import has_mask, mask_inputs, mask_keys, mask_sources, mask_spec
from pipeline.cache.recipe_entries import STATS, RecipeEntries, with_recorded
from pipeline.cache.store import Store
from pipeline.cache.users import register_user
from pipeline.encoding.fill import EntryRequests, FillResult, fill
from pipeline.encoding.jobs import Encoded, Failure, Job, Outcome, ResultsWriter, read_order
from pipeline.images.decoder_warnings import counted_warnings
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Geometry, Size
from pipeline.images.mask import load_mask, mask_error, mask_weights
from pipeline.raw_images.parallel import in_threads
from pipeline.raw_images.sources import mask_root
from pipeline.storage.addresses import address
from pipeline.storage.remote_source import source_at
from pipeline.storage.tables import MASK_COLUMNS

if TYPE_CHECKING:
    from pipeline.processes.launch import Launch, Meanwhile
    from pipeline.recipe import Recipe
    from pipeline.reporting.reports import Log, Stopwatch
    from pipeline.storage.tables import Tables

Row = Mapping[str, Any]

PPM = 1_000_000

_ASSET = "vae_latents"
_MEAN = "mask_ppm"
_KEY = "mask_key"
_WORK = (
    *("height", "width", "resized_height", "resized_width", "crop_top", "crop_left"),
    *("target_height", "target_width", "flipped", "mask_hash"),
)
"""Columns of a row that the encoder receives."""

_RECORDED = {f"mask_{name}": name for name in STATS}
"""Columns of vae_latents with an entry's stat, and their names in requests."""


def cache_masks(
    entries: RecipeEntries, requests: pl.DataFrame, tables: Tables, *, log: Log, watch: Stopwatch
) -> tuple[pl.DataFrame, FillResult | None]:
    """Bring the masks of all latents up to date.

    Args:
        entries: Entries of the recipe.
        requests: Rows of vae_latents before they have entries.
        tables: Tables of earlier runs; entries whose stat is as recorded there are trusted.
        log: Receives the progress.
        watch: As for `fill`.

    Returns:
        `requests` with the columns of masks, `mask_key` and null for rows without a mask, and the entries;
        `requests` itself and None if the recipe has no masks.

    Raises:
        StoreError: The cache cannot be read or written.
    """
    recipe = entries.recipe
    previous = tables.read_previous(_ASSET, (_KEY, _MEAN, *_RECORDED))
    if previous is not None and _KEY not in previous.columns:
        previous = None
    if not mask_sources(recipe):
        if previous is not None:
            register_earlier(entries, "masks", previous[_KEY], pl.Series([], dtype=pl.String))
            register_user(
                entries.store.address, recipe.registered_output, recipe=recipe.name, kind="masks", keys=[]
            )
        return requests.drop(MASK_COLUMNS[_ASSET], strict=False), None

    requests = requests.with_columns(mask_keys(entries, requests).alias(_KEY))
    recorded = None if previous is None else previous.drop_nulls().rename({_KEY: "key", **_RECORDED})
    register_earlier(entries, "masks", None if previous is None else previous[_KEY], requests[_KEY])
    result = fill(
        entries,
        _entry_requests(entries, requests.filter(has_mask(recipe, requests)), recorded),
        launch=_encode_here(recipe, log),
        log=log,
        watch=watch,
    )
    columns = {key: name for name, key in _RECORDED.items()} | {"key": _KEY}
    return requests.join(result.entries.rename(columns), on=_KEY, how="left", maintain_order="left"), result


def mask_counters(result: FillResult, table: pl.DataFrame) -> dict[str, int]:
    """Return the report's counters of mask entries, and of the samples with a mask."""
    masked = table.filter(pl.col(_KEY).is_not_null())
    return {
        "masked_samples": masked["sample_id"].n_unique(),
        **{f"masks_{name}": result.counters(0)[name] for name in ("encoded", "reused", "failed", "damaged")},
    }


def kept_fraction() -> pl.Expr:
    """Return the fraction of a mask's weight that is inside the crop, over rows of vae_latents."""
    target = pl.col("target_height").cast(pl.Float64) * pl.col("target_width")
    resized = pl.col("resized_height").cast(pl.Float64) * pl.col("resized_width")
    return pl.col(_MEAN) / PPM * target / resized / pl.col("mask_mean")


def _entry_requests(
    entries: RecipeEntries, rows: pl.DataFrame, recorded: pl.DataFrame | None
) -> EntryRequests:
    roots = {
        dataset.name: str(mask_root(dataset))
        for dataset in entries.recipe.datasets
        if dataset.mask is not None
    }
    sources = mask_sources(entries.recipe)

    def job(row: Row) -> Job:
        work = {name: row[name] for name in (*_WORK, "mask_path")}
        work |= {"root": roots[row["dataset"]], "source": sources[row["dataset"]]}
        facts = {"inputs": dict(vars(mask_inputs(entries, row)))}
        return Job(mask_spec(entries, row), facts, work, f"the mask of {row['sample_id']}", row["cost"])

    unique = (
        rows.drop("key", strict=False).rename({_KEY: "key"}).unique("key", keep="first", maintain_order=True)
    )
    num_bytes = {size: mask_spec(entries, row).file_bytes for size, row in _row_of_each_size(unique)}
    sizes = pl.Series([num_bytes[size] for size in unique.select("target_height", "target_width").rows()])
    unique = unique.select("key", "sample_id", "dataset", "mask_path", *_WORK).with_columns(
        num_bytes=sizes.cast(pl.Int64),
        about_bytes=sizes.cast(pl.Int64),
        name="sample_id",
        cost=pl.lit(1, pl.Int64),
    )
    return EntryRequests(
        kind="masks",
        rows=with_recorded(unique, recorded, {**STATS, _MEAN: pl.Int32}),
        settings={"max_file_bytes": entries.recipe.checks.max_file_bytes},
        spec=lambda row: mask_spec(entries, row),
        job=job,
        facts={_MEAN: lambda state: (state.metadata or {}).get(_MEAN)},
    )


def _row_of_each_size(rows: pl.DataFrame) -> list[tuple[tuple[int, int], Row]]:
    first_rows = rows.unique(["target_height", "target_width"], keep="first")
    return [((row["target_height"], row["target_width"]), row) for row in first_rows.iter_rows(named=True)]


def _encode_here(recipe: Recipe, log: Log) -> Launch:
    """Return a `Launch` that encodes in threads of this process."""

    def launch(module: str, order: Path, meanwhile: Meanwhile | None = None) -> None:
        if meanwhile is not None:
            meanwhile()
        masks = read_order(order)
        store = Store(masks.store_root)
        limit = recipe.checks.max_file_bytes
        roots = {job.work["root"] for job in masks.jobs}
        sources = {root: source_at(address(root), max_file_bytes=limit) for root in roots}
        start_s = time.perf_counter()

        def encode(job: Job) -> None:
            outcome = _outcome(job, sources[job.work["root"]].file(job.work["mask_path"]))
            if isinstance(outcome, Encoded):
                written = store.write(job.spec, outcome.tensors, {**job.facts, **outcome.facts})
                results.ended(job.spec.key, "made" if written else "present")
            else:
                results.ended(job.spec.key, outcome)

        with ResultsWriter(order, 0) as results, counted_warnings(log):
            for _ in in_threads(encode, list(masks.jobs), log=log, doing="masks encoded"):
                pass
            results.finish(time.perf_counter() - start_s)

    return launch


def _outcome(job: Job, file: Any) -> Outcome:
    work = job.work
    geometry = Geometry.from_row(work)
    try:
        values = load_mask(
            file, geometry, work["source"], flipped=work["flipped"], content_hash=work["mask_hash"]
        )
    except ImageError as err:
        named = mask_error(err, file)
        return Failure(named.reason, named.detail, named.fix)

    mean_ppm = round(float(values.mean()) / 255 * PPM)
    if not mean_ppm:
        detail = f"the mask is black where the crop to {geometry.bucket} (height x width) shows the image"
        fix = "set buckets.crop: focus, use more bucket sizes, or remove the image"
        return Failure("mask_cropped_away", detail, fix)
    size = Size(*job.spec.tensors[MASK].shape[1:])
    return Encoded({MASK: mask_weights(values, size)}, {_MEAN: mean_ppm})
