"""Reference images: what an editing model sees next to the noisy image, such as a picture before an edit."""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import BucketError
from pipeline.images.geometry import Geometry, Size
from pipeline.models.recipe_support import require_references
from pipeline.side_inputs.images import EncodedImages, mean_entries
from pipeline.side_inputs.side_input import GEOMETRY

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.recipe import Recipe


class References(EncodedImages):
    """The description of reference images."""

    def entry_rows(self, entries: RecipeEntries, rows: pl.DataFrame) -> pl.DataFrame:
        """See `SideInput.entry_rows`; RecipeError if the base model sees no references."""
        each = self._with_resolutions(entries, rows)

        # The geometry of a pipeline is computed in Python, so once per size instead of once per row.
        sizes = each.select("resolution", "height", "width").unique(maintain_order=True)
        geometry = pl.DataFrame(
            [_geometry_row(entries.family, **size) for size in sizes.iter_rows(named=True)],
            schema={"resolution": pl.Int32, **GEOMETRY},
        )
        each = each.join(
            geometry,
            on=["resolution", "height", "width"],
            how="left",
            nulls_equal=True,
            maintain_order="left",
        )
        return each.with_columns(mean_entries(entries).latent_keys(each).alias("key"))

    def _with_resolutions(self, entries: RecipeEntries, rows: pl.DataFrame) -> pl.DataFrame:
        if self.numbers(entries.recipe):
            require_references(entries.recipe, entries.family)
        each = self.exploded(entries, rows)
        return each.with_columns(_resolutions(entries.recipe, each))

    def refused(self, entries: RecipeEntries, rows: pl.DataFrame) -> dict[str, BucketError]:
        """See `SideInput.refused`; RecipeError if the base model sees no references."""
        each = self._with_resolutions(entries, rows)
        refused: dict[str, BucketError] = {}

        # Without the recipe's resolution, because previews use the size of the pipeline in any case.
        for (height, width), of_size in each.group_by("height", "width", maintain_order=True):
            try:
                reference_geometry(entries.family, Size(height, width))
            except BucketError as err:
                for sample_id, number, path in of_size.select("sample_id", "number", "path").iter_rows():
                    what = f"{self.plural}[{number}], {path}: {err.what}"
                    refused.setdefault(sample_id, BucketError(what, where=err.where, fix=err.fix))
        return refused


REFERENCES = References(
    name="reference",
    plural="references",
    recipe_key="references",
    add_file="add the reference {folder}/{name}.png, or with another suffix of images",
    hash_column="reference_images",
    keys_column="reference_keys",
    absent=("missing", "not_found", "ambiguous", "shared"),
    kind="latents",
    samples_counter="referenced_samples",
    several=True,
    only_geometry=False,
    outdated="its references are missing or outdated: they or their settings have changed since",
    more_facts={"decoding": pl.String},
    condition="references",
    stats_column="reference_stats",
)

IMAGES = REFERENCES.hash_column
"""Column with the references of a sample, a JSON array of objects."""


def reference_geometry(family: Family, original_size: Size, resolution: int | None = None) -> Geometry:
    """Return the geometry of a reference; `resolution` None stands for the size that the pipeline uses.

    Pipelines of editing models scale a reference by rules of their own, not by the geometry of its image.

    Raises:
        BucketError: The family's pipeline refuses a reference of this size.
    """
    spec = family.spec.references
    assert spec is not None, f"{family.spec.name} sees no references"

    # Computed in any case, because the pipeline refuses some sizes.
    of_pipeline = spec.geometry(family.model, original_size)
    if resolution is None:
        return of_pipeline

    multiple = family.size_multiple()

    # An extreme aspect ratio may scale an edge below the model's multiple.
    scaled = Size(*(max(multiple, edge) for edge in size_within(original_size, resolution)))
    target = Size(*(edge // multiple * multiple for edge in scaled))
    return spec.fitted(original_size, scaled=scaled, target=target)


def size_within(size: Size, resolution: int) -> Size:
    """Return `size`, scaled down to at most resolution squared pixels; edges are rounded down."""
    budget, area = resolution * resolution, size.height * size.width
    return size if area <= budget else Size(*(isqrt(edge * edge * budget // area) for edge in size))


def _resolutions(recipe: Recipe, rows: pl.DataFrame) -> pl.Series:
    settings = {dataset.name: dataset.references for dataset in recipe.datasets}
    values = [
        # The recipe may have fewer references than when the table was written.
        settings[dataset][number].resolution if number < len(settings[dataset]) else None
        for dataset, number in rows.select("dataset", "number").iter_rows()
    ]
    return pl.Series("resolution", values, dtype=pl.Int32)


def _geometry_row(family: Family, *, resolution: int | None, height: int, width: int) -> dict[str, Any]:
    geometry = reference_geometry(family, Size(height, width), resolution)
    values = (*geometry.original_size, *geometry.resized_size, *geometry.crop)
    return {"resolution": resolution, **dict(zip(GEOMETRY, values, strict=True))}
