"""Captions of a model as cache entries: their keys, jobs and texts."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from pipeline.cache.entry_format import CAPTION
from pipeline.cache.recipe_entries import STAT_COLUMNS, STATS, RecipeEntries, with_recorded
from pipeline.cache.store import EntrySpec, EntryState, Store, TensorSpec
from pipeline.captions.examples import EXAMPLES, example_inputs
from pipeline.captions.given_size import given_size
from pipeline.captions.model import CaptionModel
from pipeline.captions.tags import comparable_tags
from pipeline.encoding.fill import EntryRequests, Row
from pipeline.encoding.jobs import EncodingModel, Job
from pipeline.images.geometry import Size
from pipeline.models.fingerprints import canonical_hash
from pipeline.recipe.captions import DECIDES_TEXT
from pipeline.storage.source import MAX_TEXT_BYTES
from pipeline.versions import CAPTIONER_VERSION, PREPROCESSING_VERSION

if TYPE_CHECKING:
    from pipeline.recipe import CaptionSettings

NUM_TOKENS, CUT = "num_tokens", "cut"
"""Metadata of an entry: the number of tokens of the text, and 1 if it reached the maximum, otherwise 0."""

FAILED = "captioner_failed"
"""Reason of an image that decodes, but that the model's processor refuses."""

COUNTS = {NUM_TOKENS: pl.Int32, CUT: pl.Int32}

_ABOUT_BYTES = 512
"""Usual size of a caption, for the estimate of the space on the disk."""


def caption_spec(key: str) -> EntrySpec:
    """Return the entry of a caption, with a length that only its header states."""
    return EntrySpec("captions", key, {CAPTION: TensorSpec("uint8", (MAX_TEXT_BYTES,), ragged=True)})


def read_caption(store: Store, key: str) -> str:
    """Return the text of an entry, which may be empty.

    Raises:
        StoreError: The entry is missing or damaged.
    """
    data = store.read(caption_spec(key), verify=True)[CAPTION].tobytes()
    # Whoever may write a shared cache may have written any bytes.
    return data.decode("utf-8", errors="replace").removesuffix("\n")


def as_tensor(text: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the tensor of an entry; the newline makes it one byte long at least."""
    # A model can write half of a surrogate pair, which has no UTF-8.
    return np.frombuffer(f"{text}\n".encode("utf-8", errors="replace"), np.uint8)


def caption_requests(
    entries: RecipeEntries,
    model: CaptionModel,
    settings: CaptionSettings,
    images: pl.DataFrame,
    previous: pl.DataFrame | None,
) -> EntryRequests:
    """Return the requests of images with one model and one prompt.

    Args:
        entries: Entries of the recipe.
        model: Model that writes the captions.
        settings: Settings of the captions.
        images: Rows of `images_to_caption`.
        previous: Last table of the stage.
    """
    rows = with_keys(entries, model, settings, images).unique("key", keep="first", maintain_order=True)
    size = pl.col(STAT_COLUMNS[0])
    rows = with_recorded(rows, previous, STATS | COUNTS)
    rows = rows.with_columns(
        num_bytes=size,
        about_bytes=pl.coalesce(size, pl.lit(caption_spec("").holding({}).file_bytes + _ABOUT_BYTES)),
        name="sample_id",
        # Reading the image takes a time that grows with it, and writing the caption about the same for each.
        cost=pl.col("given_height").cast(pl.Int64) * pl.col("given_width") + 200_000,
    )
    recipe = entries.recipe
    return EntryRequests(
        kind="captions",
        rows=rows,
        settings={
            "captions": same_request(settings).model_dump_json(),
            EXAMPLES: model.examples,
            "dtype": model.dtype,
            "background": recipe.latents.background,
            "max_file_bytes": recipe.checks.max_file_bytes,
        },
        spec=lambda row: caption_spec(row["key"]),
        job=lambda row: _job(row, stated_inputs(entries, model, settings, row)),
        facts={name: partial(_recorded, name) for name in COUNTS},
        model_folder=model.folder,
        model=EncodingModel(
            same_request(settings).model_dump(mode="json"), str(recipe.source), model.fingerprint
        ),
    )


def with_keys(
    entries: RecipeEntries, model: CaptionModel, settings: CaptionSettings, images: pl.DataFrame
) -> pl.DataFrame:
    """Add the size that the model gets, and the key, a hash of everything that decides the caption."""
    common = _inputs(entries, model, settings)
    sizes = [given_size(Size(*each), settings.resolution) for each in images.select("height", "width").rows()]
    keys = [
        canonical_hash({"captions": {**common, "content_hash": content_hash, "size": list(size)}})
        for content_hash, size in zip(images["content_hash"], sizes, strict=True)
    ]
    return images.with_columns(
        given_height=pl.Series([size.height for size in sizes], dtype=pl.Int32),
        given_width=pl.Series([size.width for size in sizes], dtype=pl.Int32),
        key=pl.Series(keys, dtype=pl.String),
    )


def _inputs(entries: RecipeEntries, model: CaptionModel, settings: CaptionSettings) -> dict[str, Any]:
    """Return the inputs of the keys that images of one dataset share."""
    common = {
        "version": CAPTIONER_VERSION,
        "preprocessing_version": PREPROCESSING_VERSION,
        "background": list(entries.recipe.latents.background),
        "model": model.fingerprint,
    }
    if (tagger := settings.tagger) is not None:
        vocabulary = tagger.vocabulary
        return {
            **common,
            "threshold": tagger.threshold,
            "character_threshold": tagger.character_threshold,
            "ratings": tagger.ratings,
            "vocabulary": None if vocabulary is None else sorted(comparable_tags(vocabulary)),
            "exclude": sorted(comparable_tags(tagger.exclude)),
        }
    inputs: dict[str, Any] = {
        **common,
        "prompt": settings.prompt,
        "max_tokens": settings.max_tokens,
        "dtype": model.dtype,
    }
    # Without examples and quantization, keys are those of captions from before there were any.
    if model.examples:
        inputs[EXAMPLES] = example_inputs(model.examples)
    if settings.quantize is not None:
        inputs["quantize"] = settings.quantize
    return inputs


def stated_inputs(
    entries: RecipeEntries, model: CaptionModel, settings: CaptionSettings, row: Row
) -> dict[str, Any]:
    """Return the inputs of the key as the entry's metadata states them: with hashes of long ones."""
    size = [row["given_height"], row["given_width"]]
    inputs = {**_inputs(entries, model, settings), "content_hash": row["content_hash"], "size": size}
    # A prompt or a vocabulary may be longer than the header of an entry.
    if settings.tagger is None:
        inputs["prompt"] = hashlib.sha256(settings.prompt.encode("utf-8", "surrogatepass")).hexdigest()
        inputs[EXAMPLES] = canonical_hash(inputs[EXAMPLES]) if model.examples else None
        inputs["quantize"] = settings.quantize
    else:
        inputs |= {name: canonical_hash(inputs[name]) for name in ("vocabulary", "exclude")}
    return inputs


def _job(row: Row, inputs: dict[str, Any]) -> Job:
    names = ("root", "path", "content_hash", "height", "width", "given_height", "given_width")
    work = {name: row[name] for name in names}
    return Job(caption_spec(row["key"]), {"inputs": inputs}, work, row["name"], row["cost"])


def _recorded(name: str, state: EntryState) -> int:
    count = (state.metadata or {}).get(name)
    return -1 if count is None else count  # no caption is without its counts


def same_request(captions: CaptionSettings) -> CaptionSettings:
    """Return the settings that decide what the model writes; datasets with equal ones share a launch."""
    values = {name: getattr(captions, name) for name in DECIDES_TEXT}
    return type(captions).model_validate({"from": "model", **values})
