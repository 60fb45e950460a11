"""All that is known of one sample, from its file to its entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.requests import RecipeEntries, caption_variants
from pipeline.cache.store import EntrySpec
from pipeline.errors import LatentlineError, TableError, counted
from pipeline.storage.tables import ASSETS, empty

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.recipe import Recipe
    from pipeline.storage.tables import Tables

MAX_CANDIDATES = 10


@dataclass(frozen=True)
class Known:
    """What one stage knows of a sample.

    Attributes:
        stage: An asset, "rejected", or what begins with "latents entry" or "text entry" for the store.
        facts: Name to value, in the order to show.
    """

    stage: str
    facts: Mapping[str, Any]


def find_sample(tables: Tables, said: str) -> str:
    """The one sample that `said` means: its id, its path, or the end of either.

    Raises:
        TableError: There is no table yet, no sample is meant, or several are.
    """
    ids: set[str] = set(tables.read("raw_images")["sample_id"]) | set(tables.read_rejected()["sample_id"])
    if said in ids:
        return said
    meant = sorted(name for name in ids if name.endswith(f"/{said}")) or sorted(
        name for name in ids if said in name
    )
    if len(meant) == 1:
        return meant[0]
    where = str(tables.path("raw_images"))
    if not meant:
        fix = "name a sample by its id, <dataset>/<path>; an image that was just added is known after a job"
        raise TableError(f"no sample is called {said!r}", where=where, fix=fix)
    listed = ", ".join(meant[:MAX_CANDIDATES]) + (" and more" if len(meant) > MAX_CANDIDATES else "")
    what = f"{counted(len(meant), 'sample')} may be meant by {said!r}"
    raise TableError(what, where=where, fix=f"say which: {listed}")


def explain(recipe: Recipe, tables: Tables, sample_id: str) -> list[Known]:
    """What each stage knows of the sample, in the order of the graph, and the state of its entries.

    Stages that have no table, or no row of it, are left out. Entries are read whole.
    """
    known: list[Known] = []
    said_before: list[dict[str, Any]] = []
    own: dict[str, pl.DataFrame] = {}
    for asset in ASSETS:
        table = tables.read_previous(asset)
        table = empty(asset) if table is None else table
        own[asset] = table.filter(pl.col("sample_id") == sample_id)
        rows = own[asset].to_dicts()
        for row in rows:
            said = {name: value for name, value in row.items() if _is_news(name, value, said_before)}
            known.append(Known(asset, said))
        said_before += rows[-1:]
    for row in tables.read_rejected().filter(pl.col("sample_id") == sample_id).to_dicts():
        known.append(Known("rejected", {name: row[name] for name in ("stage", "reason", "detail", "fix")}))
    return [*known, *_entries(recipe, own)]


def _is_news(name: str, value: Any, earlier: Any) -> bool:
    """Whether no earlier stage has said the same of the sample."""
    return not any(row.get(name, ...) == value for row in earlier)


def _wanted(entries: RecipeEntries, rows: Mapping[str, pl.DataFrame]) -> Iterator[tuple[str, EntrySpec]]:
    """Each entry that the sample asks for: of its buckets, mirrored ones, and variants of its caption."""
    buckets = rows["aspect_buckets"]
    for row in entries.latent_requests(buckets).iter_rows(named=True):
        name = f"latents entry of {row['bucket']}" if len(buckets) > 1 else "latents entry"
        yield f"{name}, mirrored" if row["flipped"] else name, entries.latent_spec(row)
    for row in caption_variants(rows["validated_dataset"]).iter_rows(named=True):
        name = f"text entry, variant {row['variant']}" if row["variant"] else "text entry"
        yield name, entries.text_spec(row["caption"])


def _entries(recipe: Recipe, rows: Mapping[str, pl.DataFrame]) -> list[Known]:
    entries = RecipeEntries(recipe)
    try:
        wanted = list(_wanted(entries, rows))
    except LatentlineError as err:  # no base model, no keys
        return [Known("entries", {"unknown": err.what})]
    known: list[Known] = []
    for stage, spec in wanted:
        state = entries.store.check(spec)
        facts = {
            "key": spec.key,
            "path": entries.store.where(spec),
            "state": state.reason or state.status,
        }
        stated = entries.store.read_metadata(spec.kind, spec.key) or {}
        tensors = entries.store.read_tensor_specs(spec) or spec.tensors
        facts |= {f"{name} {list(tensor.shape)}": tensor.dtype for name, tensor in tensors.items()}
        made_of = stated.get("inputs", {})
        facts |= {f"made of {name}": value for name, value in made_of.items() if name != "content_hash"}
        known.append(Known(stage, facts))
    return known
