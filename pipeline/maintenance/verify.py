"""Verification of a recipe's cache: read every entry completely, and encode bad ones again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from pipeline.cache.recipe_entries import SEEN, RecipeEntries
from pipeline.cache.store import EntrySpec
from pipeline.captions.entries import caption_spec
from pipeline.captions.stage import caption_images
from pipeline.diagnosis.entries import loss_spec, swapped_inputs
from pipeline.diagnosis.stage import diagnose
from pipeline.evaluation import stage as evaluation
from pipeline.evaluation.known_entries import read_known, spec_of
from pipeline.evaluation.prepare import Request
from pipeline.log import Log, discard
from pipeline.processes.launch import LocalLaunch
from pipeline.raw_images.parallel import in_threads
from pipeline.raw_images.shards import unpack_shards
from pipeline.reporting.reports import read_report
from pipeline.side_inputs import SIDE_INPUTS
from pipeline.text_embeddings.caption_rows import with_seen_images
from pipeline.text_embeddings.stage import cache_text, needed_texts
from pipeline.vae_latents.stage import cache_latents

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.storage.tables import Tables


@dataclass(frozen=True)
class NeededEntry:
    """Entry that a recipe needs, and the name of the first sample that needs it."""

    name: str
    spec: EntrySpec


@dataclass(frozen=True)
class BadEntry:
    """Missing or damaged entry, its path or address as messages show it, and the problem in one sentence."""

    needed: NeededEntry
    path: str
    problem: str


def needed_entries(recipe: Recipe, tables: Tables, *, log: Log = discard) -> list[NeededEntry]:
    """Return the entries of vae_latents and text_embeddings under the current recipe, each key once.

    The entries of a model's captions, of the last diagnosis and of the last evaluation follow.

    Raises:
        TableError: One of the two tables is missing.
        ModelError: The base model cannot be found.
    """
    entries = RecipeEntries(recipe, log=log)
    needed: dict[str, NeededEntry] = {}
    latents = tables.read("vae_latents")
    for row in latents.iter_rows(named=True):
        spec = entries.latent_spec(row)
        needed.setdefault(spec.key, NeededEntry(row["sample_id"], spec))
    for side_input in SIDE_INPUTS:
        for row in side_input.entry_rows(entries, latents).iter_rows(named=True):
            spec = side_input.spec(entries, row)
            needed.setdefault(spec.key, NeededEntry(side_input.entry_name(row), spec))

    text = with_seen_images(entries, tables.read("text_embeddings"))
    images = [SEEN] if SEEN in text.columns else []
    lengths = {tuple(each): length for *each, length in text.select("caption", *images, "text_length").rows()}
    first_rows = text.unique(("caption", *images), keep="first", maintain_order=True)
    first_samples = {
        tuple(each): name for *each, name in first_rows.select("caption", *images, "sample_id").rows()
    }
    for each in needed_texts(entries, text).select("caption", *images).iter_rows():
        caption, *seen = each
        spec = entries.text_spec(caption, lengths.get(each), *seen)
        # Captions without a sample are the empty one and the preview prompts.
        name = f"the preview prompt {caption!r}" if caption else "the empty caption"
        needed.setdefault(spec.key, NeededEntry(first_samples.get(each, name), spec))
    if (captions := tables.read_previous("captions")) is not None:
        for name, key in captions.select("sample_id", "key").iter_rows():
            needed.setdefault(key, NeededEntry(name, caption_spec(key)))
    needed |= _measured(entries, tables, latents, text)
    for row in read_known(recipe.output_dir).iter_rows(named=True):
        needed.setdefault(row["key"], NeededEntry(row["name"], spec_of(row)))
    return list(needed.values())


def _measured(
    entries: RecipeEntries, tables: Tables, latents: pl.DataFrame, text: pl.DataFrame
) -> dict[str, NeededEntry]:
    """Return the entries of the last diagnosis that the recipe still needs, by key."""
    diagnosis = tables.read_previous("diagnosis")
    if diagnosis is None:
        return {}
    inputs = swapped_inputs(entries, latents, text).filter(pl.col("key").is_in(diagnosis["key"].implode()))
    return {
        row["key"]: NeededEntry(row["variant_id"], loss_spec(row)) for row in inputs.iter_rows(named=True)
    }


def verify(recipe: Recipe, needed: Sequence[NeededEntry], *, log: Log) -> list[BadEntry]:
    """Return the missing and damaged entries; reads each entry completely, on all cores.

    Raises:
        StoreError: An entry may not be read.
    """
    store = RecipeEntries(recipe).store

    # Without the recorded stats: bit rot does not change a file's stat, so only reading the file can find it.
    states = in_threads(
        lambda each: store.check(each.spec),
        needed,
        log=log,
        doing="cache entries verified",
        threads=store.threads,
    )
    return [
        BadEntry(
            each,
            state.place_in_pack or store.where(each.spec),
            state.reason or "the entry is missing",
        )
        for each, state in zip(needed, states, strict=True)
        if not state.valid
    ]


def repair(recipe: Recipe, tables: Tables, bad: Sequence[BadEntry], *, log: Log) -> None:
    """Encode bad entries again with the cache stages, which also update the rows of their samples.

    An entry that is valid in a pack is not encoded. Entries of an evaluation are computed again if the recipe
    still needs them.

    Raises:
        DatasetError: Shards were not unpacked on this machine yet, and cannot be.
        StoreError: A file cannot be deleted, or the cache cannot be written.
        LatentlineError: As `Launch`.
    """
    store = RecipeEntries(recipe).store
    specs = [each.needed.spec for each in bad]
    # A file with bit rot has the stat of a valid one, so the stages would trust it.
    for _ in in_threads(
        store.discard, specs, log=log, doing="damaged entries discarded", threads=store.threads
    ):
        pass

    # The job has unpacked them, but perhaps on another machine.
    unpack_shards(recipe, log=log, only_new=True)
    launch = LocalLaunch(recipe.accelerate)
    kinds = {each.needed.spec.kind for each in bad}

    if kinds & {"pictures", "features"}:
        report = read_report(recipe.output_dir, evaluation.ASSET) or {}
        steps = {each["step"] for each in report.get("steps", [])}
        request = Request(report.get("run"), tuple(sorted(steps)) or None)
        evaluation.evaluate(recipe, request, tables, launch=launch, log=log)
        kinds -= {"pictures", "features"}

    if "captions" in kinds:
        result = caption_images(recipe, tables.read("raw_images"), tables, launch=launch, log=log)
        tables.write("captions", result.table)
        kinds -= {"captions"}

    needs_diagnosis = "diagnoses" in kinds
    kinds -= {"diagnoses"}
    # Latents and entries of side inputs are columns of one table.
    if kinds - {"text"}:
        result = cache_latents(recipe, tables.read("aspect_buckets"), tables, launch=launch, log=log)
        tables.write("vae_latents", result.table)
        tables.write_rejected("vae_latents", result.rejected)
    if "text" in kinds:
        result = cache_text(recipe, tables.read("validated_dataset"), tables, launch=launch, log=log)
        tables.write("text_embeddings", result.table)
        tables.write_rejected("text_embeddings", result.rejected)
    if needs_diagnosis:
        latents, text = tables.read("vae_latents"), tables.read("text_embeddings")
        tables.write("diagnosis", diagnose(recipe, latents, text, tables, launch=launch, log=log).table)
