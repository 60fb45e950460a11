"""The order of a run's inputs by their contents, so that renaming trains nothing again (FAILURES R17)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from pipeline.log import Log, discard
from pipeline.outputs.folder import outputs_of
from pipeline.trained_lora.fingerprint import run_facts, run_id
from pipeline.trained_lora.inputs import IDENTITY, TrainingInputs
from pipeline.trained_lora.job import with_steps
from pipeline.trained_lora.recipe_facts import Facts
from pipeline.trained_lora.run_folder import RunLayout, run_folder

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.recipe import Recipe

_HASH_CHARACTERS = 32
"""Characters of an image's hash in its identity: 128 bits distinguish all images and take less memory."""

_NAMES = ("variant_id", "sample_id", "dataset", "pair")
"""Columns of inputs that are names, and so do not distinguish copies of an image."""


def planned_run(
    entries: RecipeEntries, named: TrainingInputs, contents: pl.DataFrame, *, log: Log = discard
) -> tuple[Recipe, TrainingInputs, Facts]:
    """Return the recipe with its length in steps, the inputs in the order of the run, and the run's facts.

    `named` are the inputs ordered by name. `contents` has columns sample_id and content_hash, and may have
    several rows per sample.

    Raises:
        TrainingError: As `with_steps` and `run_facts`.
        ModelError: As `run_facts`.
        StoreError: The service of the output folder does not answer.
    """
    ordered = by_content(named, entries.recipe, contents)
    recipe = with_steps(entries.recipe, ordered)
    facts = run_facts(recipe, entries, ordered)
    outputs = outputs_of(recipe, log)
    is_known = RunLayout(run_folder(recipe.output_dir, run_id(facts))).facts.is_file()
    if is_known or not (outputs.is_remote or _has_former_runs(recipe.output_dir)):
        return recipe, ordered, facts

    # Names ordered the runs of 0.3.0 and earlier, and their ids contain them.
    former_recipe = with_steps(entries.recipe, named)
    former = run_facts(former_recipe, entries, named)
    former_run = RunLayout(run_folder(recipe.output_dir, run_id(former)))
    at_address = f"runs/{former_run.folder.name}/{former_run.facts.name}"
    if former_run.facts.is_file() or (outputs.is_remote and outputs.read(at_address)):
        return former_recipe, named, former
    return recipe, ordered, facts


def _has_former_runs(output_dir: Path) -> bool:
    # Facts of a million samples take seconds, so they are not computed for runs that cannot exist.
    return any(b'"ordered_by"' not in path.read_bytes() for path in output_dir.glob("runs/*/run.json"))


def by_content(named: TrainingInputs, recipe: Recipe, contents: pl.DataFrame) -> TrainingInputs:
    """Return the inputs with the column `IDENTITY`, and sorted by it.

    An identity is the beginning of the image's hash, followed by " (<bucket>)" if the sample has several
    buckets. Copies of an image are numbered in an order that depends on names only if the copies are
    interchangeable. The name of a slider's pair is replaced by the smaller identity of its images.
    """
    hashes = contents.select("sample_id", content="content_hash").unique("sample_id")
    table = named.table.join(hashes, on="sample_id", how="left", maintain_order="left")
    content = pl.col("content").str.slice(0, _HASH_CHARACTERS)
    has_several_buckets = pl.len().over("sample_id") > 1
    table = table.with_columns(
        content=pl.when(has_several_buckets).then(pl.format("{} ({})", content, "bucket")).otherwise(content)
    )
    table = table.join(_copies(table, recipe), on="variant_id", how="left", maintain_order="left")

    numbered = pl.format("{} #{}", "content", pl.col("copy") + 1)
    identity = pl.when(pl.col("copy") > 0).then(numbered).otherwise("content")
    table = table.with_columns(identity.alias(IDENTITY)).drop("content", "copy")
    if "pair" in table.columns:
        smaller = pl.col(IDENTITY).min().over("pair", "held_out")
        table = table.with_columns(pair=pl.when(pl.col("pair").is_not_null()).then(smaller))
    return TrainingInputs(table.sort(IDENTITY))


def _copies(table: pl.DataFrame, recipe: Recipe) -> pl.DataFrame:
    """Return variant_id and the number of the `copy`, from 0, of inputs with equal `content`."""
    if "pair" in table.columns:
        images = pl.col("content").sort().str.join(" ").over("pair", "held_out")
        table = table.with_columns(partners=pl.when(pl.col("pair").is_not_null()).then(images))
    positions = {dataset.name: position for position, dataset in enumerate(recipe.datasets)}
    copies = table.filter(pl.col("content").is_duplicated())
    copies = copies.with_columns(
        trained_as=pl.struct(pl.exclude(*_NAMES)).struct.json_encode(),
        position=pl.col("dataset").replace_strict(positions, return_dtype=pl.Int32),
    ).sort("content", "trained_as", "position", "variant_id")
    return copies.select("variant_id", copy=pl.int_range(pl.len()).over("content"))
