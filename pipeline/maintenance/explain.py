"""Explanation of one sample: what each stage recorded of it, and the state of its cache entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.recipe_entries import SEEN, RecipeEntries
from pipeline.cache.store import EntrySpec
from pipeline.captions.entries import caption_spec
from pipeline.errors import LatentlineError, TableError, counted
from pipeline.evaluation.known_entries import read_known, spec_of
from pipeline.log import Log, discard
from pipeline.side_inputs import SIDE_INPUTS
from pipeline.storage.tables import ASSETS, empty
from pipeline.text_embeddings.caption_rows import EMPTY_CAPTION, text_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.recipe import Recipe
    from pipeline.storage.tables import Tables

MAX_CANDIDATES = 10
"""Maximum number of matching samples that an error lists."""


@dataclass(frozen=True)
class StageFacts:
    """What one stage recorded of a sample, in the order in which it is shown.

    `stage` is an asset, "rejected", or a cache entry: "latents entry...", "mask entry...", "reference
    <number> entry..." or "text entry...".
    """

    stage: str
    facts: Mapping[str, Any]


def find_sample(tables: Tables, name: str) -> str:
    """Return the sample_id of the only sample with this id, path, end of a path, or part of an id.

    Raises:
        TableError: No table exists yet, no sample matches, or several do.
    """
    ids: set[str] = set(tables.read("raw_images")["sample_id"]) | set(tables.read_rejected()["sample_id"])
    if name in ids:
        return name

    # A complete file name precedes a part of a name: "rose.jpg" means that file even if "big_rose.jpg"
    # exists.
    matches = sorted(sample_id for sample_id in ids if sample_id.endswith(f"/{name}"))
    matches = matches or sorted(sample_id for sample_id in ids if name in sample_id)
    if len(matches) == 1:
        return matches[0]

    where = str(tables.path("raw_images"))
    if not matches:
        fix = "use a sample id, <dataset>/<path>; run the cache job first if the image is new"
        raise TableError(f"no sample matches {name!r}", where=where, fix=fix)
    candidates = ", ".join(matches[:MAX_CANDIDATES]) + (", ..." if len(matches) > MAX_CANDIDATES else "")
    what = f"{counted(len(matches), 'sample matches', 'samples match')} {name!r}"
    raise TableError(what, where=where, fix=f"use one of {candidates}")


def explain(recipe: Recipe, tables: Tables, sample_id: str, *, log: Log = discard) -> list[StageFacts]:
    """Return what each stage recorded of the sample, in the order of the graph, and its entries' states.

    Stages without a table or without a row of the sample are omitted, as are values that an earlier stage
    already reported. Entries are read completely.
    """
    explained: list[StageFacts] = []
    earlier_rows: list[dict[str, Any]] = []
    sample_rows: dict[str, pl.DataFrame] = {}
    for asset in ASSETS:
        table = tables.read_previous(asset)
        table = empty(asset) if table is None else table
        sample_rows[asset] = table.filter(pl.col("sample_id") == sample_id)
        rows = sample_rows[asset].to_dicts()
        explained += [StageFacts(asset, _new_facts(row, earlier_rows)) for row in rows]
        # One row per stage suffices: rows of a sample differ only in columns of this stage.
        earlier_rows += rows[-1:]

    rejected = tables.read_rejected().filter(pl.col("sample_id") == sample_id)
    reasons = rejected.select("stage", "reason", "detail", "fix").to_dicts()
    explained += [StageFacts("rejected", reason) for reason in reasons]
    entries = RecipeEntries(recipe, log=log)
    explained += _explain_caption(entries, tables, sample_id)
    explained += _explain_entries(entries, sample_rows)
    explained += _explain_diagnosis(tables, sample_id)
    return explained + _explain_features(entries, recipe, sample_id)


def _explain_caption(entries: RecipeEntries, tables: Tables, sample_id: str) -> list[StageFacts]:
    """Return the caption that a model wrote of the sample, and the state of its entry."""
    table = tables.read_previous("captions")
    rows = [] if table is None else table.filter(sample_id=sample_id).to_dicts()
    return [
        StageFacts(name, facts)
        for row in rows
        for name, facts in (
            ("captions", {name: row[name] for name in ("caption", "num_tokens", "cut")}),
            ("captions entry", _entry_facts(entries, caption_spec(row["key"]))),
        )
    ]


def _explain_diagnosis(tables: Tables, sample_id: str) -> list[StageFacts]:
    """Return what the last diagnosis measured of each caption of the sample."""
    table = tables.read_previous("diagnosis")
    rows = () if table is None else table.filter(sample_id=sample_id).iter_rows(named=True)
    names = ("caption", "score", "low", "high", "verdict", "better_caption", "passes", "key")
    return [StageFacts("diagnosis", {name: row[name] for name in names}) for row in rows]


def _explain_features(entries: RecipeEntries, recipe: Recipe, sample_id: str) -> list[StageFacts]:
    """Return the features that the last evaluation has of the sample, one for each scorer."""
    named = read_known(recipe.output_dir).filter(pl.col("name").str.starts_with(f"{sample_id}, "))
    scorers = [row["name"].removeprefix(f"{sample_id}, ") for row in named.iter_rows(named=True)]
    specs = [spec_of(row) for row in named.iter_rows(named=True)]
    return [
        StageFacts(f"features entry of {scorer}", _entry_facts(entries, spec))
        for scorer, spec in zip(scorers, specs, strict=True)
    ]


def _new_facts(row: Mapping[str, Any], earlier_rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: value
        for name, value in row.items()
        # An Ellipsis differs from every value, also from None.
        if not any(earlier.get(name, ...) == value for earlier in earlier_rows)
    }


def _explain_entries(entries: RecipeEntries, sample_rows: Mapping[str, pl.DataFrame]) -> list[StageFacts]:
    """Return key, path, state, tensors and inputs of each entry of the sample."""
    try:
        specs = list(_entry_specs(entries, sample_rows))
    except LatentlineError as err:  # keys need the base model
        return [StageFacts("entries", {"unknown": err.what})]

    return [StageFacts(name, _entry_facts(entries, spec)) for name, spec in specs]


def _entry_facts(entries: RecipeEntries, spec: EntrySpec) -> dict[str, Any]:
    state = entries.store.check(spec)
    metadata = entries.store.read_metadata(spec.kind, spec.key) or {}
    tensors = entries.store.read_tensor_specs(spec) or spec.tensors
    stated = metadata.get("inputs")
    inputs: Mapping[str, Any] = stated if isinstance(stated, dict) else {}
    facts = {
        "key": spec.key,
        "path": state.place_in_pack or entries.store.where(spec),
        "state": state.reason or state.status,
    }
    facts |= {f"{tensor} {list(each.shape)}": each.dtype for tensor, each in tensors.items()}
    return facts | {f"made of {name}": value for name, value in inputs.items() if name != "content_hash"}


def _entry_specs(
    entries: RecipeEntries, sample_rows: Mapping[str, pl.DataFrame]
) -> Iterator[tuple[str, EntrySpec]]:
    """Yield name and specification of each entry: per bucket, mirrored ones, and per caption variant."""
    buckets = sample_rows["aspect_buckets"]
    requests = entries.latent_requests(buckets)
    side_inputs = [
        (side_input, side_input.entry_rows(entries, requests).partition_by("row", as_dict=True))
        for side_input in SIDE_INPUTS
    ]
    for index, row in enumerate(requests.iter_rows(named=True)):
        name = f"latents entry of {row['bucket']}" if len(buckets) > 1 else "latents entry"
        mirrored = ", mirrored" if row["flipped"] else ""
        yield name + mirrored, entries.latent_spec(row)
        for side_input, rows in side_inputs:
            for entry_row in rows.get((index,), requests.clear()).iter_rows(named=True):
                named = name.replace("latents", side_input.label(entry_row))
                yield named + mirrored, side_input.spec(entries, entry_row)
    for row in text_rows(entries, sample_rows["validated_dataset"]).iter_rows(named=True):
        name = f"text entry, variant {row['variant']}" if row["variant"] else "text entry"
        name = "text entry, empty caption" if row["variant"] == EMPTY_CAPTION else name
        yield name, entries.text_spec(row["caption"], images=row.get(SEEN))
