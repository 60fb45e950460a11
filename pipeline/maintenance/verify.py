"""Every entry that a recipe's tables name, read whole: bit rot changes no stat, only this can see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.cache.requests import RecipeEntries
from pipeline.cache.store import EntrySpec, EntryState
from pipeline.processes.launch import LocalLaunch
from pipeline.reporting.reports import Log
from pipeline.text_embeddings.stage import cache_text, wanted_captions
from pipeline.vae_latents.stage import cache_latents

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.storage.tables import Tables


@dataclass(frozen=True)
class Needed:
    """An entry that a recipe's tables ask for, and the first sample that does."""

    name: str
    spec: EntrySpec


@dataclass(frozen=True)
class Bad:
    """An entry that cannot be used.

    Attributes:
        needed: Which.
        path: Where it is, or should be, as messages name it.
        problem: One sentence.
    """

    needed: Needed
    path: str
    problem: str


def needed_entries(recipe: Recipe, tables: Tables) -> list[Needed]:
    """Of vae_latents and text_embeddings as the recipe now reads, each key once.

    Raises:
        TableError: There is no table of one of them.
        ModelError: The base model cannot be found.
    """
    entries = RecipeEntries(recipe)
    latents = tables.read("vae_latents").to_dicts()
    text = tables.read("text_embeddings")
    first: dict[str, Needed] = {}
    for row in latents:
        spec = entries.latent_spec(row)
        first.setdefault(spec.key, Needed(row["sample_id"], spec))
    samples = dict(zip(text["caption"].reverse(), text["sample_id"].reverse(), strict=True))
    lengths = dict(zip(text["caption"], text["text_length"], strict=True))
    for caption in wanted_captions(recipe, text["caption"]):
        spec = entries.text_spec(caption, lengths.get(caption))
        name = f"the sample prompt {caption!r}" if caption else "the empty caption"
        first.setdefault(spec.key, Needed(samples.get(caption, name), spec))
    return list(first.values())


def verify(
    recipe: Recipe, needed: Sequence[Needed], progress: Callable[[Iterator[EntryState]], Iterator[EntryState]]
) -> list[Bad]:
    """Those of the entries that are missing or damaged; each is read whole, on all cores.

    Args:
        recipe: Says where the store is.
        needed: As `needed_entries`.
        progress: Is given the states as they come, and passes them on.

    Raises:
        StoreError: An entry may not be read.
    """
    store = RecipeEntries(recipe).store
    with ThreadPoolExecutor(store.threads) as pool:
        states = progress(pool.map(lambda each: store.check(each.spec), needed))
        return [
            Bad(each, store.where(each.spec), state.reason or "it is missing")
            for each, state in zip(needed, states, strict=True)
            if not state.valid
        ]


def repair(recipe: Recipe, tables: Tables, bad: Sequence[Bad], *, log: Log) -> None:
    """Make bad entries again, as the cache job would; their samples' rows are brought up to date.

    A damaged file is deleted first, because one that rotted has the stat of a good one and would be trusted.

    Raises:
        StoreError: A file cannot be deleted, or the cache not written.
        LatentlineError: As `Launch`.
    """
    store = RecipeEntries(recipe).store
    for each in bad:
        store.remove(each.needed.spec)  # a folder in its place is moved aside by the store itself
    launch = LocalLaunch(recipe.accelerate)
    kinds = {each.needed.spec.kind for each in bad}
    if "latents" in kinds:
        made = cache_latents(recipe, tables.read("aspect_buckets"), tables, launch=launch, log=log)
        tables.write("vae_latents", made.table)
        tables.write_rejected("vae_latents", made.rejected)
    if "text" in kinds:
        made = cache_text(recipe, tables.read("validated_dataset"), tables, launch=launch, log=log)
        tables.write("text_embeddings", made.table)
