"""Find the side inputs of each image, decode each file once, and reject samples without usable files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.images.formats import ImageError
from pipeline.raw_images.sources import side_input_sources_of
from pipeline.reporting.rejections import rejection
from pipeline.storage.tables import REJECTED, SIDE_INPUT_COLUMNS
from pipeline.validated_dataset.paired_files import Finder, PairedFile, PairedSamples, Reader, usable

if TYPE_CHECKING:
    from pipeline.log import Log
    from pipeline.recipe import Recipe
    from pipeline.side_inputs import SideInput

STAGE = "validated_dataset"

Row = dict[str, Any]


def with_side_input(
    recipe: Recipe,
    side_input: SideInput,
    samples: pl.DataFrame,
    raw: pl.DataFrame,
    known: pl.DataFrame,
    *,
    log: Log,
) -> PairedSamples:
    """Add the files of a side input to all samples of datasets with such files.

    Args:
        recipe: The recipe.
        side_input: The kind of files.
        samples: Samples with a usable image and caption.
        raw: Table raw_images; a file of any of these images is not unmatched.
        known: Facts of files that earlier runs read, with the columns `SideInput.facts`.
        log: Receives the progress.

    Raises:
        DatasetError: A folder of the files cannot be listed, or the manifest cannot be used.
    """
    sources = side_input_sources_of(recipe, side_input.recipe_key)
    if not sources:
        return PairedSamples(samples, pl.DataFrame(schema=REJECTED), pl.DataFrame(schema=side_input.facts))

    finders = {
        dataset.name: [
            Finder(dataset, settings, source, raw, side_input=side_input)
            for settings, source in zip(side_input.sections(dataset), sources[dataset.name], strict=True)
        ]
        for dataset in recipe.datasets
        if dataset.name in sources
    }
    rows = samples.filter(pl.col("dataset").is_in(list(finders))).rows(named=True)
    found = {row["sample_id"]: [finder.find(row) for finder in finders[row["dataset"]]] for row in rows}

    # Several images may name one file, such as a reference of all of them; it is read once.
    files = dict.fromkeys(file for each in found.values() for file in each if isinstance(file, PairedFile))
    by_root = {str(source.address): source for each in sources.values() for source in each}
    reader = Reader(by_root, partial(side_input.read, recipe), known, log)
    facts = reader.read(list(files), doing=f"{side_input.plural} read")

    accepted: list[Row] = []
    rejected: list[Row] = []
    for row in rows:
        try:
            usable_facts = _usable(side_input, found[row["sample_id"]], facts)
            accepted.append({"sample_id": row["sample_id"], **side_input.columns(row, usable_facts)})
        except ImageError as err:
            rejected.append({**row, **rejection(err, STAGE, row["content_hash"])})

    columns = SIDE_INPUT_COLUMNS[side_input.plural][STAGE]
    table = pl.DataFrame(accepted, schema={"sample_id": pl.String, **columns})
    kept = samples.join(table, on="sample_id", how="left", maintain_order="left")
    is_complete = ~pl.col("dataset").is_in(list(finders)) | pl.col(side_input.hash_column).is_not_null()
    return PairedSamples(
        kept.filter(is_complete),
        pl.DataFrame([{name: row[name] for name in REJECTED} for row in rejected], schema=REJECTED),
        usable(list(facts.values()), side_input.facts),
        _unmatched(side_input, finders),
    )


def _usable(
    side_input: SideInput,
    files: Sequence[PairedFile | ImageError],
    facts: Mapping[PairedFile, Row | ImageError],
) -> list[Row]:
    """Return the facts of a sample's files, in order.

    Raises:
        ImageError: A file is missing or cannot be used; the reason starts with the name of the side input.
    """
    usable_facts: list[Row] = []
    for number, file in enumerate(files):
        fact = file if isinstance(file, ImageError) else facts[file]
        if not isinstance(fact, ImageError):
            usable_facts.append(fact)
            continue

        error = fact if isinstance(file, ImageError) else side_input.error(fact, file.path)
        detail = f"{side_input.plural}[{number}]: {error.detail}" if len(files) > 1 else error.detail
        raise ImageError(error.reason, detail, fix=error.fix)
    return usable_facts


def _unmatched(side_input: SideInput, finders: Mapping[str, Sequence[Finder]]) -> list[str]:
    """Return the files without an image. If an image has several, only the folder tells them apart."""
    return sorted(
        {
            f"{name}: {finder.where(path)}" if side_input.several else f"{name}/{path}"
            for name, each in finders.items()
            for finder in each
            for path in finder.unmatched()
        }
    )
