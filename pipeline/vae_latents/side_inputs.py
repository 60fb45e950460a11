"""Side inputs of vae_latents: what their entries need, and which samples lack one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.recipe_entries import STATS, TARGET, RecipeEntries
from pipeline.side_inputs import SIDE_INPUTS, SideInput
from pipeline.side_inputs.images import mean_entries
from pipeline.storage.tables import REJECTED

if TYPE_CHECKING:
    from pipeline.encoding.jobs import Failure

_ASSET = "vae_latents"

VAE_SIDE_INPUTS = tuple(side_input for side_input in SIDE_INPUTS if side_input.kind == "latents")
"""Side inputs that the VAE encodes, in the same processes as the latents of samples."""


def without_refused(
    entries: RecipeEntries, requests: pl.DataFrame
) -> tuple[pl.DataFrame, list[dict[str, Any]]]:
    """Return the requests of samples with side inputs that the base model accepts, and rejected rows.

    Raises:
        RecipeError: The base model does not see the recipe's references.
    """
    rejected: list[dict[str, Any]] = []
    for side_input in SIDE_INPUTS:
        refused = side_input.refused(entries, requests)
        if not refused:
            continue
        is_refused = pl.col("sample_id").is_in(list(refused))
        samples = requests.filter(is_refused).unique("sample_id", keep="first", maintain_order=True)
        for row in samples.iter_rows(named=True):
            error = refused[row["sample_id"]]
            reason = f"{side_input.name}_refused"
            values = {**row, "stage": _ASSET, "reason": reason, "detail": error.what, "fix": error.fix}
            rejected.append({name: values[name] for name in REJECTED})
        requests = requests.filter(~is_refused)
    return requests, rejected


def requested_images(
    entries: RecipeEntries, side_inputs: Mapping[SideInput, pl.DataFrame]
) -> list[pl.DataFrame]:
    """Return the entry rows of each of `VAE_SIDE_INPUTS` with everything that their jobs need.

    These are the columns of `RecipeEntries.latent_shapes`, `root` (the folder of the file) and `side_input`
    (its plural).
    """
    requested: list[pl.DataFrame] = []
    for side_input in VAE_SIDE_INPUTS:
        rows = side_inputs[side_input]
        shapes = mean_entries(entries).latent_shapes(rows)
        roots = [
            (dataset.name, number, str(root))
            for dataset in entries.recipe.datasets
            for number, root in enumerate(dataset.side_input_roots(side_input.recipe_key))
        ]
        schema = {"dataset": pl.String, "number": pl.Int32, "root": pl.String}
        folders = pl.DataFrame(roots, schema=schema, orient="row")
        rows = rows.join(shapes, on=TARGET, how="left", maintain_order="left")
        rows = rows.join(folders, on=["dataset", "number"], how="left", maintain_order="left")
        requested.append(rows.with_columns(side_input=pl.lit(side_input.plural)))
    return requested


def recorded_images(table: pl.DataFrame | None) -> pl.DataFrame:
    """Return `key` and the columns of `STATS` of each entry of `VAE_SIDE_INPUTS` that a table recorded."""
    return pl.concat([side_input.recorded(table).select("key", *STATS) for side_input in VAE_SIDE_INPUTS])


def failures_by_row(
    side_inputs: Mapping[SideInput, pl.DataFrame], failures: Mapping[str, Failure]
) -> dict[int, dict[str, str]]:
    """Return the first failure of a side input by the index of its row, as columns of a rejected sample."""
    by_row: dict[int, dict[str, str]] = {}
    for side_input, rows in side_inputs.items():
        failed = rows.filter(pl.col("key").is_in(list(failures)))
        for row, number, path, key in failed.select("row", "number", "path", "key").iter_rows():
            failure = asdict(failures[key])
            # The VAE's processes encode any image, so their failures do not name the side input yet.
            if side_input in VAE_SIDE_INPUTS:
                failure["reason"] = f"{side_input.name}_{failure['reason']}"
                failure["detail"] = f"{side_input.plural}[{number}], {path}: {failure['detail']}"

            # The first side input that cannot be used gives the reason of the rejection.
            by_row.setdefault(row, failure)
    return by_row


def side_input_counters(
    side_inputs: Mapping[SideInput, pl.DataFrame], samples: Iterable[str]
) -> dict[str, int]:
    """Return the report's counters of samples with side inputs, and of the entries of `VAE_SIDE_INPUTS`."""
    # Entries of rejected samples are in the cache, but they are not part of the result.
    kept = pl.DataFrame({"sample_id": pl.Series(samples, dtype=pl.String)}).unique()
    counters: dict[str, int] = {}
    for side_input, rows in side_inputs.items():
        if rows.is_empty():
            continue
        used = rows.join(kept, on="sample_id", how="semi")
        if side_input in VAE_SIDE_INPUTS:
            counters[f"{side_input.name}_entries"] = used["key"].n_unique()
        counters[side_input.samples_counter] = used["sample_id"].n_unique()
    return counters
