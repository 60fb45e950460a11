"""Captions with the reference images that a text encoder sees next to them.

Only some families have such an encoder, see `ReferenceSpec.in_text`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.recipe_entries import SEEN, RecipeEntries
from pipeline.errors import BucketError
from pipeline.images.decode import decoded, decoding_of, hash_bytes, limits_of_recipe, read_bytes
from pipeline.images.geometry import Size
from pipeline.models.fingerprints import canonical_text
from pipeline.side_inputs import REFERENCES
from pipeline.side_inputs.references import IMAGES

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.storage.addresses import Address

FILES = "image_files"
"""Column with the files of the images in `SEEN`, as JSON for the encoder's jobs."""

EMPTY_CAPTION = -1
"""`variant` of the empty caption with the references of a sample."""

CAPTION_COLUMNS = ("sample_id", "dataset", "path", "caption", "more_captions", IMAGES)
"""Columns of validated_dataset that decide a sample's captions; not every table has `IMAGES`."""


def caption_variants(validated: pl.DataFrame) -> pl.DataFrame:
    """Return one row per caption of a sample, sorted by `sample_id` and `variant`, which counts from 0.

    `validated` needs the columns `caption` and `more_captions` of validated_dataset.
    """
    # Most datasets have one caption per sample, and decoding JSON takes longer than all the rest.
    has_more = pl.col("more_captions") != "[]"
    single = validated.filter(~has_more).with_columns(variant=pl.lit(0, pl.Int32))

    more_captions = pl.col("more_captions").str.json_decode(pl.List(pl.String))
    captions = pl.concat_list("caption", more_captions)
    variants = pl.int_ranges(0, captions.list.len(), dtype=pl.Int32)
    several = validated.filter(has_more).with_columns(caption=captions, variant=variants)
    return pl.concat([single, several.explode("caption", "variant")]).sort("sample_id", "variant")


def text_rows(entries: RecipeEntries, validated: pl.DataFrame) -> pl.DataFrame:
    """Return one row per caption of a sample, sorted by `sample_id` and `variant`.

    If the text encoder sees references, the rows have `IMAGES`, `SEEN` and `FILES`. If the family's pipeline
    encodes the empty caption with images too, it is the variant `EMPTY_CAPTION` of a sample. Samples with a
    reference that the base model refuses have no rows.

    `validated` needs the columns `CAPTION_COLUMNS` of validated_dataset.
    """
    rows = caption_variants(validated)
    if entries.text_images is None:
        return rows.drop(IMAGES, strict=False)

    rows = with_seen_images(entries, rows)
    rows = rows.filter(rows[SEEN].is_not_null() | ~REFERENCES.used(entries.recipe, rows))
    names = _with_empty_captions(entries.recipe)
    if entries.sees_images_in_negative and names:
        # One per sample: the empty caption has no variants, but it has the images of its sample.
        first = rows.filter(
            pl.col("variant") == 0, pl.col(SEEN).is_not_null(), pl.col("dataset").is_in(names)
        )
        variant = pl.lit(EMPTY_CAPTION, pl.Int32)
        rows = pl.concat([rows, first.with_columns(caption=pl.lit(""), variant=variant)])
    return rows.sort("sample_id", "variant")


def _with_empty_captions(recipe: Recipe) -> list[str]:
    """Return the datasets of which dropout or default previews use the empty caption with the references."""
    training = recipe.training
    in_previews = training.sample_every > 0 and not training.sample_prompts
    return [name for name, dropout in recipe.caption_dropouts.items() if dropout > 0 or in_previews]


def with_seen_images(entries: RecipeEntries, rows: pl.DataFrame) -> pl.DataFrame:
    """Add `SEEN` and `FILES`, which are null for rows without references and for refused ones.

    If the text encoder sees no references, the rows are returned as they are.
    """
    if entries.text_images is None:
        return rows
    if IMAGES not in rows.columns:
        rows = rows.with_columns(pl.lit(None, pl.String).alias(IMAGES))
    roots = {
        dataset.name: dataset.side_input_roots(REFERENCES.recipe_key) for dataset in entries.recipe.datasets
    }

    # Captions of one sample share its images, which are described once.
    referenced = rows.filter(REFERENCES.used(entries.recipe, rows)).select("dataset", IMAGES)
    seen = [
        (dataset, images, *_seen(entries, roots[dataset], json.loads(images)))
        for dataset, images in referenced.unique(maintain_order=True).iter_rows()
    ]
    names = ("dataset", IMAGES, SEEN, FILES)
    images = pl.DataFrame(seen, schema=dict.fromkeys(names, pl.String), orient="row")
    return rows.join(images, on=["dataset", IMAGES], how="left", maintain_order="left")


def file_images(entries: RecipeEntries, paths: Sequence[Path]) -> tuple[str | None, str | None]:
    """Return the columns `SEEN` and `FILES` for the reference images of a prompt, given as local files.

    Both are None if the prompt has no references, or if the base model's text encoder does not see them.

    Raises:
        ImageError: A file is missing, or is not an image.
        BucketError: The base model refuses a reference of this size.
    """
    if entries.text_images is None or not paths:
        return None, None
    images: list[dict[str, Any]] = []
    limits = limits_of_recipe(entries.recipe.checks)
    for path in paths:
        rules: list[str] = []
        with decoded(path, entries.recipe.latents.background, limits=limits, rules=rules) as image:
            size = {"height": image.height, "width": image.width, "decoding": decoding_of(rules)}
        images.append({"path": path.name, "hash": hash_bytes(read_bytes(path)), **size})
    return _described(entries, [path.parent for path in paths], images)


def _seen(
    entries: RecipeEntries, roots: Iterable[Address], images: Sequence[Mapping[str, Any]]
) -> tuple[str | None, str | None]:
    try:
        return _described(entries, roots, images)
    except BucketError:
        # vae_latents rejects the sample for this reason.
        return None, None


def _described(
    entries: RecipeEntries, roots: Iterable[Address], images: Sequence[Mapping[str, Any]]
) -> tuple[str, str]:
    spec, text_images = entries.family.spec.references, entries.text_images
    assert spec is not None
    assert text_images is not None

    seen: list[list[Any]] = []
    files: list[dict[str, Any]] = []
    for root, image in zip(roots, images, strict=False):
        original = Size(image["height"], image["width"])
        spec.size(entries.family.model, original)  # raises for some
        size = text_images.size(original)
        rules = [image["decoding"]] if image.get("decoding") else []
        seen.append([image["hash"], *size, *rules])
        files.append(
            {
                "root": str(root),
                "path": image["path"],
                "content_hash": image["hash"],
                "original_size": list(original),
                "size": list(size),
            }
        )
    return canonical_text(seen), json.dumps(files)
