"""Find the reference images of each image, decode each once, and reject samples without usable references."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import polars as pl

from pipeline.images.decode import DecodeLimits, decoded
from pipeline.images.formats import ImageError
from pipeline.raw_images.rejection import rejection
from pipeline.raw_images.scan_index import REFERENCES
from pipeline.raw_images.sources import reference_sources_of
from pipeline.storage.tables import REFERENCE_COLUMNS, REJECTED
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

_WORDS = Words("reference", "add the reference {folder}/{name}.png, or with another suffix of images")

Row = dict[str, Any]


def with_references(
    recipe: Recipe, samples: pl.DataFrame, raw: pl.DataFrame, known: pl.DataFrame, *, log: Log
) -> PairedSamples:
    """Add the references of all samples whose dataset has references; return all samples if none has.

    Args:
        recipe: The recipe.
        samples: Samples whose image and caption can be used.
        raw: Table raw_images; a reference of any of these images is not unmatched.
        known: Facts of references that earlier runs read, with the columns `REFERENCES`.
        log: Receives the progress.

    Raises:
        DatasetError: A folder of references cannot be listed, or the manifest cannot be used.
    """
    sources = reference_sources_of(recipe)
    if not sources:
        return PairedSamples(samples, pl.DataFrame(schema=REJECTED), pl.DataFrame(schema=REFERENCES))

    finders = {
        dataset.name: [
            Finder(dataset, reference, source, raw, words=_WORDS)
            for reference, source in zip(dataset.references, sources[dataset.name], strict=True)
        ]
        for dataset in recipe.datasets
        if dataset.references
    }
    rows = samples.filter(pl.col("dataset").is_in(list(finders))).rows(named=True)
    found = {row["sample_id"]: [each.find(row) for each in finders[row["dataset"]]] for row in rows}
    files = (file for each in found.values() for file in each if isinstance(file, PairedFile))
    by_root = {str(source.address): source for each in sources.values() for source in each}
    reader = Reader(by_root, partial(_read_content, recipe), known, log)
    facts = reader.read(list(dict.fromkeys(files)), doing="references read")

    references: list[Row] = []
    rejected: list[Row] = []
    for row in rows:
        try:
            usable_facts = _usable(found[row["sample_id"]], facts)
        except ImageError as err:
            rejected.append({**row, **rejection(err, STAGE, row["content_hash"])})
        else:
            references.append({"sample_id": row["sample_id"], "reference_images": _as_json(usable_facts)})

    table = pl.DataFrame(references, schema={"sample_id": pl.String, **REFERENCE_COLUMNS[STAGE]})
    kept = samples.join(table, on="sample_id", how="left", maintain_order="left")
    kept = kept.filter(~pl.col("dataset").is_in(list(finders)) | pl.col("reference_images").is_not_null())
    unmatched = {
        f"{name}: {finder.where(path)}"
        for name, each in finders.items()
        for finder in each
        for path in finder.unmatched()
    }
    return PairedSamples(
        kept,
        pl.DataFrame([{name: row[name] for name in REJECTED} for row in rejected], schema=REJECTED),
        usable(list(facts.values()), REFERENCES),
        sorted(unmatched),
    )


def _read_content(recipe: Recipe, opened: BinaryIO, _kind: str) -> Row:
    limits = DecodeLimits(recipe.checks.max_image_pixels, recipe.checks.max_decode_bytes)
    with decoded(opened, recipe.latents.background, limits=limits) as image:
        return {"height": image.height, "width": image.width}


def _usable(
    files: Sequence[PairedFile | ImageError], facts: Mapping[PairedFile, Row | ImageError]
) -> list[Row]:
    """Return the facts of a sample's references, in order.

    Raises:
        ImageError: A reference is missing or cannot be used; the reason starts with "reference_".
    """
    usable_facts: list[Row] = []
    for number, file in enumerate(files):
        fact = file if isinstance(file, ImageError) else facts[file]
        if not isinstance(fact, ImageError):
            usable_facts.append(fact)
            continue

        reason = fact.reason if fact.reason.startswith("reference_") else f"reference_{fact.reason}"
        detail = fact.detail if isinstance(file, ImageError) else f"the reference {file.path}: {fact.detail}"
        if len(files) > 1:
            detail = f"references[{number}]: {detail}"
        raise ImageError(reason, detail, fix=fact.fix)
    return usable_facts


def _as_json(facts: Sequence[Row]) -> str:
    """Return the text of the column `reference_images`, see its schema."""
    return json.dumps([{name: fact[name] for name in ("path", "hash", "height", "width")} for fact in facts])
