"""The losses of each caption of a dataset as cache entries: their inputs, keys and jobs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.entry_format import LOSSES
from pipeline.cache.recipe_entries import STATS, TARGET, RecipeEntries, with_recorded
from pipeline.cache.store import EntrySpec, TensorSpec
from pipeline.diagnosis.caption_swap import MAX_DRAWS
from pipeline.diagnosis.other_captions import CaptionPool
from pipeline.encoding.fill import EntryRequests, Row
from pipeline.encoding.jobs import Job
from pipeline.models.fingerprints import canonical_hash
from pipeline.recipe.diagnosis import MIN_OTHERS, NUM_OTHERS
from pipeline.trained_lora.identities import by_content
from pipeline.trained_lora.inputs import COLUMNS as INPUT_COLUMNS
from pipeline.trained_lora.inputs import IDENTITY, SIDE_INPUT_COLUMNS, tensors_json, training_inputs
from pipeline.trained_lora.prompts import entry_to_json
from pipeline.versions import DIAGNOSIS_VERSION

if TYPE_CHECKING:
    from pipeline.recipe import CaptionSettings, Recipe

RECIPE = "recipe"
"""Key of the recipe in the settings of an encoding of losses."""

EMPTY_TEXT = "empty_text"
"""Key of the entry of the empty caption in these settings."""

_SIDE_INPUTS: dict[str, Any] = {
    name: kind for columns in SIDE_INPUT_COLUMNS.values() for name, kind in columns.items()
}

WORK_COLUMNS: dict[str, Any] = {**INPUT_COLUMNS, **_SIDE_INPUTS, IDENTITY: pl.String}
"""Columns of the worker's input, those of training inputs. Only recipes with side inputs have all of them."""

_NAMES = ("variant_id", "sample_id", "dataset", "bucket", "repeats", "held_out", "captions")

_KEY_COLUMNS = tuple(name for name in WORK_COLUMNS if name not in _NAMES and not name.endswith("_tensors"))
"""Columns of the worker's input that decide the losses. Keys of entries stand for captions and tensors."""


def num_others(recipe: Recipe) -> int:
    """Return the maximum number of other captions that are measured for an image."""
    return NUM_OTHERS if recipe.diagnosis is None else recipe.diagnosis.others


def swapped_inputs(entries: RecipeEntries, latents: pl.DataFrame, text: pl.DataFrame) -> pl.DataFrame:
    """Return one row per caption of each image, sorted, with `WORK_COLUMNS`, `variant`, `path` and `key`.

    An image is in its largest bucket and unmirrored. Its `captions` are its own one and up to `NUM_OTHERS`
    others: the own one with a word exchanged, and captions of other images. `variant` is the caption's index
    among the image's captions, and `key` is null with fewer than `MIN_OTHERS` others.

    Args:
        entries: Entries of the recipe.
        latents: Table of vae_latents, as it is or as it will be.
        text: Table of text_embeddings, as it is or as it will be.

    Raises:
        ModelError: The base model cannot be found.
        TrainingError: A sample has no text embedding.
    """
    # Inputs by content, because the identity decides the noise: renaming a file changes no key.
    table = by_content(training_inputs(entries.recipe, entries, latents, text), entries.recipe, latents).table
    table = table.sort(pl.col(TARGET[0]) * pl.col(TARGET[1]), IDENTITY, descending=[True, False])
    table = table.unique("sample_id", keep="first", maintain_order=True).sort("sample_id")
    views = ("latents", "crops_top", "crops_left", *SIDE_INPUT_COLUMNS)
    columns = {name: kind for name, kind in WORK_COLUMNS.items() if name in table.columns}
    table = table.with_columns(pl.col(name).list.head(1) for name in views if name in columns)

    texts: dict[str, tuple[str, str]] = {
        caption: (key, tensors)
        for row in table.select("captions", "texts", "text_tensors").iter_rows()
        for caption, key, tensors in zip(*row, strict=True)
    }
    # A caption whose encoder saw the references of its own image says nothing about another image.
    comparable = () if entries.text_images is not None else texts
    pool = CaptionPool(comparable, partial(_triggers_in, entries.recipe.trained_triggers))
    others = {own: pool.others(own, NUM_OTHERS) for own in texts}
    composed = sorted({caption for each in others.values() for caption in each}.difference(texts))
    any_length = tensors_json(entries.text_tensors())
    texts |= {
        caption: (key, any_length) for caption, key in zip(composed, entries.text_keys(composed), strict=True)
    }

    rows: list[dict[str, Any]] = []
    for row in table.iter_rows(named=True):
        for variant, own in enumerate(row["captions"]):
            captions = [own, *others[own]]
            keys, tensors = zip(*(texts[caption] for caption in captions), strict=True)
            more = {"captions": captions, "texts": list(keys), "text_tensors": list(tensors)}
            variant_id = f"{row['sample_id']}, caption {variant + 1}"
            rows.append({**row, **more, "variant_id": variant_id, "variant": variant})
    inputs = pl.DataFrame(rows, schema={**columns, "variant": pl.Int32})
    paths = latents.select("sample_id", "path").unique("sample_id")
    inputs = inputs.join(paths, on="sample_id", how="left", maintain_order="left")
    return inputs.with_columns(key=_keys(entries, inputs))


def _triggers_in(settings: Sequence[CaptionSettings], caption: str) -> frozenset[str]:
    return frozenset(each.trigger for each in settings if each.trigger and each.names_trigger(caption))


def loss_requests(
    entries: RecipeEntries, inputs: pl.DataFrame, previous: pl.DataFrame | None
) -> EntryRequests:
    """Return the requests of the rows of `swapped_inputs`; `previous` is the last table of the stage."""
    # Copies of an image that have one caption share an entry.
    rows = inputs.drop_nulls("key").unique("key", keep="first", maintain_order=True)
    num_bytes = pl.Series([loss_spec(row).file_bytes for row in rows.iter_rows(named=True)], dtype=pl.Int64)
    rows = rows.with_columns(
        num_bytes=num_bytes,
        about_bytes=num_bytes,
        cost=pl.col("target_height").cast(pl.Int64) * pl.col("target_width"),
        name="variant_id",
    )
    if previous is not None:
        previous = previous.drop_nulls("key")
    settings = {
        RECIPE: entries.recipe.model_dump(mode="json"),
        EMPTY_TEXT: entry_to_json(entries.text_spec("")),
    }
    return EntryRequests(
        kind="diagnoses",
        rows=with_recorded(rows, previous, STATS),
        settings=settings,
        spec=loss_spec,
        job=_job,
        facts={},
    )


def loss_spec(row: Row) -> EntrySpec:
    """Return the entry of a row with `key` and `captions`."""
    shape = (MAX_DRAWS, len(row["captions"]))
    return EntrySpec("diagnoses", row["key"], {LOSSES: TensorSpec("float32", shape)})


def _job(row: Row) -> Job:
    work = {name: row[name] for name in WORK_COLUMNS if name in row}
    return Job(loss_spec(row), {}, work, row["name"], row["cost"])


def _keys(entries: RecipeEntries, inputs: pl.DataFrame) -> pl.Series:
    """Return a hash of everything that decides the losses of each row; null with too few others."""
    recipe, family = entries.recipe, entries.family
    common = {
        "version": DIAGNOSIS_VERSION,
        "family": family.spec.name,
        "denoiser": entries.fingerprint("denoiser"),
        "mixed_precision": family.mixed_precision(recipe.accelerate.mixed_precision),
        "quantize": recipe.training.packing,
        "guidance": recipe.training.guidance if family.takes_guidance else None,
    }
    masks = {
        each.name: each.mask and [each.mask.unmasked_weight, each.mask.normalise] for each in recipe.datasets
    }
    names = [name for name in _KEY_COLUMNS if name in inputs.columns]
    measured = num_others(recipe)
    keys: list[str | None] = []
    for row in inputs.iter_rows(named=True):
        if len(row["captions"]) <= MIN_OTHERS:
            keys.append(None)
            continue
        decides = {**common, "mask": masks[row["dataset"]], **{name: row[name] for name in names}}
        # Without a choice, the losses do not depend on the number.
        if len(row["captions"]) > 1 + measured:
            decides["others"] = measured
        keys.append(canonical_hash({"diagnoses": decides}))
    return pl.Series(keys, dtype=pl.String)
