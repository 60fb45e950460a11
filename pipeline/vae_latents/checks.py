"""Checks of vae_latents: every latent exists, with the geometry's shape, exact size and finite values.

To add a check, such as a gate on latent means: write a function here that returns an `Outcome`, and add it
to `outcomes` in `run` and the columns that it reads to `_COLUMNS`. Declare the check under the same name in
`pipeline/recipe/check_specs.py`, then generate the pages that list all checks (CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.aspect_buckets.stage import rows_by_placement
from pipeline.cache.recipe_entries import (
    LATENT_SHAPE,
    STAT_COLUMNS,
    TARGET,
    RecipeEntries,
    with_recorded,
)
from pipeline.encoding.checks import AT_ONCE, REPAIR, Problem, Problems
from pipeline.errors import counted, verb
from pipeline.images.geometry import Placement
from pipeline.reporting.findings import CheckContext, Finding, Outcome, findings
from pipeline.reporting.rejections import (
    REJECTED_COLUMNS,
    most_frequent_first,
    most_frequent_fixes,
    no_samples_left,
)
from pipeline.side_inputs import MASKS, SIDE_INPUTS, SideInput
from pipeline.side_inputs.masks import MEAN
from pipeline.storage.needed_columns import DECODING_COLUMNS, SIDE_INPUT_HASHES
from pipeline.storage.tables import SIDE_INPUT_COLUMNS, has_defect
from pipeline.vae_latents.masks import kept_fraction

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

STAGE = "vae_latents"

_NAMES = ("sample_id", "bucket", "flipped")

_GEOMETRY = (
    *("height", "width", "resized_height", "resized_width"),
    *("crop_top", "crop_left", "target_height", "target_width"),
)

_OPTIONAL_COLUMNS = (*SIDE_INPUT_HASHES, *DECODING_COLUMNS)
"""Columns that not every table has."""

_BUCKET_COLUMNS = ("sample_id", "dataset", "bucket", "content_hash", *_GEOMETRY, *_OPTIONAL_COLUMNS)
"""Columns of aspect_buckets that identify a latent and decide its keys and the keys of its side inputs."""

MIN_KEPT = 0.5
"""Fraction of a mask's weight inside the crop below which a warning names the mask."""

_COLUMNS = tuple(
    dict.fromkeys(
        [
            *(*_BUCKET_COLUMNS, "flipped", *LATENT_SHAPE, "key", *STAT_COLUMNS),
            *(name for columns in SIDE_INPUT_COLUMNS.values() for name in columns[STAGE]),
        ]
    )
)
"""Columns of vae_latents that the checks use."""


def run(context: CheckContext) -> list[Finding]:
    """Return the findings of all checks, from the tables, the store and the base model's files."""
    table = context.tables.read(STAGE, _COLUMNS)
    entries = RecipeEntries(context.recipe, log=context.log)
    expected_keys = entries.latent_keys(table)

    # Rows with another key are reported by completeness; their entries belong to something else.
    own = table.filter(table["key"] == expected_keys).unique("key", keep="first", maintain_order=True)
    sizes = entries.latent_shapes(own).select(*TARGET, "num_bytes")
    entry_rows = own.join(sizes, on=TARGET, how="left", maintain_order="left")
    problems = Problems(entries.store, "latents", entry_rows, entries.latent_spec, log=entries.log)

    side_input_problems = [_side_input_problems(side_input, entries, table) for side_input in SIDE_INPUTS]

    buckets = context.tables.read("aspect_buckets", _BUCKET_COLUMNS)
    rejected = context.tables.read_rejected(STAGE)
    expected = entries.with_mirrored(buckets.join(rejected, on="sample_id", how="anti")).sort(_NAMES)

    num_samples = counted(buckets["sample_id"].n_unique(), "sample")
    count = counted(problems.num_entries, "entry", "entries")
    outcomes = {
        "completeness": problems.outcome(
            "completeness",
            f"each of {num_samples} has its entry or was rejected",
            more=[
                *_table_differences(entries, table, expected_keys, expected),
                *(row for each in SIDE_INPUTS for row in _missing(each, entries, table, expected)),
                *_rows(side_input_problems, "completeness"),
            ],
        ),
        "shape_uniformity": problems.outcome(
            "shape_uniformity",
            f"{count} with the geometry's shapes, one per bucket",
            more=[
                *_wrong_shapes(context, entries, table),
                *_mixed_buckets(table),
                *_rows(side_input_problems, "shape_uniformity"),
            ],
        ),
        "file_size_outliers": problems.outcome(
            "file_size_outliers",
            f"{count} of exactly the expected size",
            more=_rows(side_input_problems, "file_size_outliers"),
        ),
        "finite_values": problems.outcome(
            "finite_values", f"{count} with valid content", more=_rows(side_input_problems, "finite_values")
        ),
        "rejected_fraction": _rejected_fraction(context, table["sample_id"]),
        "masks_cropped": cropped_masks(context.recipe, table),
    }
    return findings(context, STAGE, outcomes)


def _rows(side_input_problems: Iterable[Problems], check: Problem) -> list[dict[str, Any]]:
    return [row for problems in side_input_problems for row in problems.rows(check)]


def _missing(
    side_input: SideInput, entries: RecipeEntries, table: pl.DataFrame, expected: pl.DataFrame
) -> Iterator[dict[str, Any]]:
    datasets = list(side_input.numbers(entries.recipe))
    if not datasets:
        return
    required = expected.filter(pl.col("dataset").is_in(datasets))
    keys = required.select(*_NAMES).with_columns(expected=side_input.keys(entries, required))
    column = side_input.keys_column
    stored = table.select(*_NAMES, stored=table[column] if column in table.columns else pl.lit(None))
    both = keys.join(stored, on=_NAMES, how="inner", maintain_order="left")
    wrong = both.filter(pl.col("expected").is_null() | pl.col("expected").ne_missing(pl.col("stored")))
    for sample_id in wrong["sample_id"].unique(maintain_order=True):
        yield {"sample_id": sample_id, "problem": side_input.outdated}


def _side_input_problems(side_input: SideInput, entries: RecipeEntries, table: pl.DataFrame) -> Problems:
    used = table.filter(side_input.used(entries.recipe, table))
    # Rows with other keys are reported by completeness.
    if side_input.keys_column in used.columns:
        used = used.filter(used[side_input.keys_column] == side_input.keys(entries, used))
    else:
        used = used.clear()
    rows = side_input.entry_rows(entries, used).unique("key", keep="first", maintain_order=True)
    rows = with_recorded(side_input.with_num_bytes(entries, rows), side_input.recorded(used))
    return Problems(entries.store, side_input.kind, rows, partial(side_input.spec, entries), log=entries.log)


def cropped_masks(recipe: Recipe, table: pl.DataFrame) -> Outcome:
    """Return the masks that lose more than `MIN_KEPT` of their weight to the crop."""
    used = table.filter(MASKS.used(recipe, table))
    if used.is_empty() or MEAN not in used.columns:
        return Outcome(True, "no sample has a mask")

    # A mirrored latent keeps the same fraction of its mask.
    lost = used.filter(~pl.col("flipped")).select("sample_id", "bucket", kept=kept_fraction().round(3))
    lost = lost.filter(pl.col("kept") < MIN_KEPT).sort("kept", "sample_id")
    numbers = {"cropped": len(lost)}
    if lost.is_empty():
        return Outcome(True, f"the crops keep at least {MIN_KEPT:.0%} of each mask", numbers=numbers)
    masks = counted(len(lost), "mask loses", "masks lose")
    first, _, kept = lost.row(0)
    summary = f"{masks} more than half of its weight to the crop, first {first}, which keeps {kept:.1%}"
    fix = "use buckets.crop: focus with datasets[].focus_columns, or more bucket sizes"
    return Outcome(False, summary, fix, lost.rows(named=True), numbers)


def _table_differences(
    entries: RecipeEntries, table: pl.DataFrame, expected_keys: pl.Series, expected: pl.DataFrame
) -> Iterator[dict[str, Any]]:
    names = [name for name in expected.columns if name not in _OPTIONAL_COLUMNS]

    # The usual case ends here, before any join.
    if table.select(names).equals(expected.select(names)) and table["key"].equals(expected_keys):
        return

    expected_rows = expected.select(*_NAMES, expected_key=entries.latent_keys(expected))
    both = table.select(*_NAMES, "key").join(expected_rows, on=_NAMES, how="full", coalesce=True)
    different = both.filter(~pl.col("key").eq_missing(pl.col("expected_key"))).sort(_NAMES)
    samples = set(table["sample_id"])
    columns = (*_NAMES, "key", "expected_key")
    for sample_id, bucket, mirrored, key, expected_key in different.select(columns).iter_rows():
        if key is None:
            subject = "it"
            if sample_id in samples:
                subject = "its mirrored latent" if mirrored else f"its latent of {bucket}"
            problem = f"{subject} is in aspect_buckets but not in vae_latents"
        elif expected_key is None:
            problem = f"it is not in aspect_buckets as {bucket}"
            problem = "the recipe does not need its mirrored latent" if mirrored else problem
        else:
            problem = "its entry belongs to another content, geometry, model or setting"
        yield {"sample_id": sample_id, "problem": problem}


def _wrong_shapes(
    context: CheckContext, entries: RecipeEntries, table: pl.DataFrame
) -> Iterator[dict[str, Any]]:
    # In slices, so that the geometry of millions of rows is never in memory together.
    for placement, of_placement in rows_by_placement(context.recipe, table):
        for rows in of_placement.iter_slices(AT_ONCE):
            yield from _wrong_shapes_of(placement, entries, rows)


def _wrong_shapes_of(
    placement: Placement, entries: RecipeEntries, rows: pl.DataFrame
) -> Iterator[dict[str, Any]]:
    # The geometry is computed again from the original size; an image may have several buckets.
    # Only a random crop depends on the name of the sample.
    names = rows["sample_id"] if placement.crop == "random" else None
    assigned = placement.assign_many(rows["height"].to_numpy(), rows["width"].to_numpy(), names)
    sizes = pl.DataFrame(
        {
            "target_height": assigned.columns.target_height,
            "target_width": assigned.columns.target_width,
        }
    )
    shapes = sizes.cast(pl.Int32).join(entries.latent_shapes(sizes), on=TARGET, maintain_order="left")
    expected = shapes.select(pl.col(LATENT_SHAPE).name.prefix("expected_"))
    both = rows.select("sample_id", *LATENT_SHAPE)[assigned.image].hstack(expected)

    same = pl.all_horizontal(pl.col(name) == pl.col(f"expected_{name}") for name in LATENT_SHAPE)

    # An image has several assignments if it has several buckets; one with the row's shape suffices.
    both = both.with_columns(row=pl.Series(assigned.image), same=same)
    wrong = both.filter(~pl.col("same").any().over("row")).unique("row", keep="last", maintain_order=True)
    for sample_id, *values in wrong.drop("row", "same").iter_rows():
        problem = f"its latent must have the shape {tuple(values[3:])}, got {tuple(values[:3])}"
        yield {"sample_id": sample_id, "problem": problem}


def _mixed_buckets(table: pl.DataFrame) -> Iterator[dict[str, Any]]:
    shapes = table.group_by("bucket", *LATENT_SHAPE).len().group_by("bucket").agg(shapes=pl.len())
    for bucket, num_shapes in shapes.filter(pl.col("shapes") > 1).sort("bucket").iter_rows():
        yield {"sample_id": f"bucket {bucket}", "problem": f"it has latents of {num_shapes} shapes"}


def _rejected_fraction(context: CheckContext, kept: pl.Series) -> Outcome:
    # Both cache stages reject a sample if its reference has changed and must be encoded.
    stages = ("raw_images", "validated_dataset", "aspect_buckets", STAGE, "text_embeddings")
    all_rejected = pl.concat([context.tables.read_rejected(stage) for stage in stages])
    if kept.is_empty():
        return no_samples_left(all_rejected, REPAIR)

    # The recipe's bucket settings decide what aspect_buckets rejects, as its filters do.
    rejected = all_rejected.filter(has_defect() & (pl.col("stage") != "aspect_buckets"))
    rejected_here = rejected.filter(pl.col("stage") == STAGE)
    rejected = rejected.unique("sample_id", keep="first", maintain_order=True)
    num_kept = kept.filter(~kept.is_in(rejected["sample_id"].implode())).n_unique()
    total, limit = num_kept + len(rejected), context.recipe.checks.max_rejected_fraction
    fraction = len(rejected) / total if total else 0.0
    numbers = {"rejected": len(rejected), "rejected_here": len(rejected_here), "of": total, "limit": limit}
    numbers |= {"fraction": round(fraction, 6)}

    summary = (
        f"{len(rejected):,} of {counted(total, 'image')} {verb(len(rejected), 'is', 'are')} rejected, "
        f"{len(rejected_here):,} of them by vae_latents ({fraction:.1%}, the limit is {limit:.1%})"
    )
    if fraction <= limit:
        return Outcome(True, summary, numbers=numbers)
    fix = most_frequent_fixes(rejected, otherwise="or raise checks.max_rejected_fraction")
    rows = most_frequent_first(rejected).select(REJECTED_COLUMNS).rows(named=True)
    return Outcome(False, summary, fix, rows, numbers)
