"""Find the mask of each image, decode it once, and reject samples whose mask is missing or not usable."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import polars as pl

from pipeline.cache.mask_entries import mask_sources
from pipeline.images.decode import DecodeLimits
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Size
from pipeline.images.mask import MaskSource, mask_error, read_mask
from pipeline.raw_images.rejection import rejection
from pipeline.raw_images.scan_index import MASKS
from pipeline.raw_images.sources import mask_sources_of
from pipeline.storage.tables import MASK_COLUMNS, REJECTED
from pipeline.validated_dataset.paired_files import (
    Finder,
    PairedFile,
    PairedSamples,
    Reader,
    Words,
    usable,
)

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.reporting.reports import Log

STAGE = "validated_dataset"

_WORDS = Words("mask", "draw the mask {folder}/{name}.png, white where the image counts")

Row = dict[str, Any]


def with_masks(
    recipe: Recipe, samples: pl.DataFrame, raw: pl.DataFrame, known: pl.DataFrame, *, log: Log
) -> PairedSamples:
    """Add the masks of all samples whose dataset has masks; return all samples if none has.

    Args:
        recipe: The recipe.
        samples: Samples whose image and caption can be used.
        raw: Table raw_images; a mask of any of these images is not unmatched.
        known: Facts of masks that earlier runs read, with the columns `MASKS`.
        log: Receives the progress.

    Raises:
        DatasetError: The folder of the masks cannot be listed, or the manifest cannot be used.
    """
    sources, kinds = mask_sources_of(recipe), mask_sources(recipe)
    if not sources:
        return PairedSamples(samples, pl.DataFrame(schema=REJECTED), pl.DataFrame(schema=MASKS))

    finders = {
        dataset.name: Finder(
            dataset, dataset.mask, sources[dataset.name], raw, words=_WORDS, kind=kinds[dataset.name]
        )
        for dataset in recipe.datasets
        if dataset.mask is not None
    }
    rows = samples.filter(pl.col("dataset").is_in(list(finders))).rows(named=True)
    found = {row["sample_id"]: finders[row["dataset"]].find(row) for row in rows}
    files = list(dict.fromkeys(each for each in found.values() if isinstance(each, PairedFile)))
    limits = DecodeLimits(recipe.checks.max_image_pixels, recipe.checks.max_decode_bytes)
    by_root = {str(source.address): source for source in sources.values()}
    facts = Reader(by_root, partial(_read_content, limits), known, log).read(files, doing="masks read")

    masks: list[Row] = []
    rejected: list[Row] = []
    for row in rows:
        mask = found[row["sample_id"]]
        try:
            fact = _usable(row, mask, facts)
        except ImageError as err:
            rejected.append({**row, **rejection(err, STAGE, row["content_hash"])})
        else:
            columns = {"mask_path": fact["path"], "mask_hash": fact["hash"], "mask_mean": fact["mean"]}
            masks.append({"sample_id": row["sample_id"], **columns})

    table = pl.DataFrame(masks, schema={"sample_id": pl.String, **MASK_COLUMNS[STAGE]})
    kept = samples.join(table, on="sample_id", how="left", maintain_order="left")
    kept = kept.filter(~pl.col("dataset").is_in(list(finders)) | pl.col("mask_hash").is_not_null())
    return PairedSamples(
        kept,
        pl.DataFrame([{name: row[name] for name in REJECTED} for row in rejected], schema=REJECTED),
        usable(list(facts.values()), MASKS),
        sorted(f"{name}/{path}" for name, finder in finders.items() for path in finder.unmatched()),
    )


def _read_content(limits: DecodeLimits, opened: BinaryIO, kind: str) -> Row:
    content = read_mask(opened, cast("MaskSource", kind), limits=limits)
    return {**content.size._asdict(), "mean": content.mean}


def _usable(row: Row, mask: PairedFile | ImageError, facts: Mapping[PairedFile, Row | ImageError]) -> Row:
    """Return the facts of a sample's mask.

    Raises:
        ImageError: The sample has no mask, or it cannot be used; the reason starts with "mask_".
    """
    if isinstance(mask, ImageError):
        raise mask
    fact = facts[mask]
    if isinstance(fact, ImageError):
        raise mask_error(fact, mask.path)

    image, size = Size(row["height"], row["width"]), Size(fact["height"], fact["width"])
    if size == image:
        return fact
    detail = f"the mask {mask.path} is {size}, and its image is {image} (height x width, as displayed)"
    if size == image.transposed:
        fix = "rotate the mask as the image is displayed; the image's EXIF orientation rotates it"
        raise ImageError("mask_orientation", detail, fix=fix)
    raise ImageError("mask_size", detail, fix=f"export the mask in the size of the image, {image}")
