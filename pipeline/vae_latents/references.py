"""Reference images of vae_latents: which entries they need, and the columns that record them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.recipe_entries import STAT_COLUMNS, STATS, TARGET, RecipeEntries
from pipeline.cache.reference_entries import (
    KEYS,
    STATS_TEXT,
    of_references,
    reference_rows,
    refused_references,
)
from pipeline.storage.tables import REFERENCE_COLUMNS, REJECTED

if TYPE_CHECKING:
    from pipeline.encoding.jobs import Failure
    from pipeline.recipe import Recipe

_ASSET = "vae_latents"


def without_refused(
    entries: RecipeEntries, requests: pl.DataFrame
) -> tuple[pl.DataFrame, list[dict[str, Any]]]:
    """Return the requests of samples whose references the base model accepts, and the others' rejections.

    Raises:
        RecipeError: The base model does not see the recipe's references.
    """
    refused = refused_references(entries, requests)
    is_refused = pl.col("sample_id").is_in(list(refused))
    samples = requests.filter(is_refused).unique("sample_id", keep="first", maintain_order=True)
    rejected: list[dict[str, Any]] = []
    for row in samples.iter_rows(named=True):
        error = refused[row["sample_id"]]
        reason = {"stage": _ASSET, "reason": "reference_refused", "detail": error.what, "fix": error.fix}
        rejected.append({name: {**row, **reason}[name] for name in REJECTED})
    return requests.filter(~is_refused), rejected


def requested_references(entries: RecipeEntries, requests: pl.DataFrame) -> pl.DataFrame:
    """Return one row per reference of each row of vae_latents, with everything that its entry needs.

    Args:
        entries: Entries of the recipe.
        requests: Rows of vae_latents before they have entries.

    Returns:
        The columns of `reference_rows`, those of `RecipeEntries.latent_shapes`, `root` (the folder of the
        reference) and `posterior`.

    Raises:
        RecipeError: The base model does not see the recipe's references.
    """
    references = reference_rows(entries, requests)
    shapes = of_references(entries).latent_shapes(references)
    references = references.join(shapes, on=TARGET, how="left", maintain_order="left")
    roots = [
        (dataset.name, number, str(root))
        for dataset in entries.recipe.datasets
        for number, root in enumerate(dataset.reference_roots)
    ]
    folders = pl.DataFrame(
        roots, schema={"dataset": pl.String, "number": pl.Int32, "root": pl.String}, orient="row"
    )
    references = references.join(folders, on=["dataset", "number"], how="left", maintain_order="left")
    return references.with_columns(posterior=pl.lit("mean"))


def with_reference_columns(
    recipe: Recipe, requests: pl.DataFrame, references: pl.DataFrame, entries: pl.DataFrame
) -> pl.DataFrame:
    """Return `requests` with the columns of references if the recipe has references, and without them if not.

    Args:
        recipe: The recipe.
        requests: Rows of vae_latents before they have entries.
        references: Their `requested_references`.
        entries: Valid entries: `key` and `STAT_COLUMNS`.
    """
    if not any(dataset.references for dataset in recipe.datasets):
        return requests.drop(REFERENCE_COLUMNS[_ASSET], strict=False)
    stats = pl.concat_list(pl.col(name).cast(pl.String) for name in STAT_COLUMNS).list.join(",")
    recorded = references.join(entries, on="key", how="left", maintain_order="left")
    by_row = recorded.group_by("row", maintain_order=True).agg(
        pl.col("key").str.join(" ").alias(KEYS),
        pl.format("[{}]", pl.format("[{}]", stats).str.join(",")).alias(STATS_TEXT),
    )
    indexed = requests.with_row_index("row").join(by_row, on="row", how="left", maintain_order="left")
    return indexed.drop("row")


def recorded_references(table: pl.DataFrame | None) -> pl.DataFrame:
    """Return `key` and `STAT_COLUMNS` of each reference's entry that a table of vae_latents recorded."""
    rows: list[tuple[Any, ...]] = []
    if table is not None and KEYS in table.columns:
        for keys, stats in table.select(KEYS, STATS_TEXT).drop_nulls().unique().iter_rows():
            pairs = zip(keys.split(), json.loads(stats), strict=True)
            rows += [(key, *stat) for key, stat in pairs]
    return pl.DataFrame(rows, schema={"key": pl.String, **STATS}, orient="row").unique(
        "key", keep="first", maintain_order=True
    )


def failures_by_row(references: pl.DataFrame, failures: Mapping[str, Failure]) -> dict[int, dict[str, str]]:
    """Return the first failure of a reference by the index of its row in vae_latents, as rejected columns."""
    failed = references.filter(pl.col("key").is_in(list(failures)))
    by_row: dict[int, dict[str, str]] = {}
    for row, number, path, key in failed.select("row", "number", "path", "key").iter_rows():
        failure = asdict(failures[key])
        reason = f"reference_{failure['reason']}"
        detail = f"references[{number}], {path}: {failure['detail']}"
        by_row.setdefault(row, {**failure, "reason": reason, "detail": detail})
    return by_row


def reference_counters(references: pl.DataFrame, table: pl.DataFrame) -> dict[str, int]:
    """Return the report's counters of references: their entries, and the samples that have some."""
    used = references.join(table, on="sample_id", how="semi")
    return {
        "reference_entries": used["key"].n_unique(),
        "referenced_samples": used["sample_id"].n_unique(),
    }
