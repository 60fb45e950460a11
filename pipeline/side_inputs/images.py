"""Images that the denoiser sees next to the noisy image, encoded by the VAE like the images of samples.

An entry is a latent, mirrored if the latent of the sample is.
"""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import polars as pl

from pipeline.cache.entry_format import LATENT
from pipeline.cache.recipe_entries import STAT_COLUMNS, RecipeEntries
from pipeline.cache.store import TensorSpec
from pipeline.images.decode import decoded, decoding_of, limits_of_recipe
from pipeline.images.geometry import Size
from pipeline.side_inputs.side_input import RECORDED, VIEW, Row, SideInput

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

_IMAGE = pl.Struct(
    {"path": pl.String, "hash": pl.String, "height": pl.Int32, "width": pl.Int32, "decoding": pl.String}
)


@dataclass(frozen=True, eq=False)
class EncodedImages(SideInput, ABC):
    """The description of images that the denoiser sees; `hash_column` is a JSON array of objects.

    `stats_column` is the column of vae_latents with the stats of the entries, as JSON.
    """

    stats_column: str

    def read(self, recipe: Recipe, opened: BinaryIO, kind: str) -> Row:
        """See `SideInput.read`."""
        background, limits = recipe.latents.background, limits_of_recipe(recipe.checks)
        rules: list[str] = []
        with decoded(opened, background, limits=limits, rules=rules) as image:
            return {"height": image.height, "width": image.width, "decoding": decoding_of(rules)}

    def columns(self, image: Row, files: Sequence[Row]) -> Row:
        """See `SideInput.columns`."""
        names = ("path", "hash", "height", "width")
        images = [
            {name: file[name] for name in names}
            # Only where it applies, so that the values of all other files are those of earlier releases.
            | ({} if file["decoding"] is None else {"decoding": file["decoding"]})
            for file in files
        ]
        return {self.hash_column: json.dumps(images)}

    def hashes(self) -> pl.Expr:
        """See `SideInput.hashes`."""
        images = pl.col(self.hash_column).str.json_decode(pl.List(_IMAGE))
        return images.list.eval(pl.element().struct.field("hash")).list.join(" ")

    def exploded(self, entries: RecipeEntries, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the entry rows without geometry and key; `height` and `width` are the size of the file."""
        # The index is taken before the filter, since callers join results to `rows` by it.
        indexed = rows.with_row_index("row").filter(self.used(entries.recipe, rows))
        if self.hash_column not in indexed.columns:
            indexed = indexed.with_columns(pl.lit(None, pl.String).alias(self.hash_column))
        images = indexed.select(
            *("row", "sample_id", "dataset", "bucket", "flipped"),
            image=pl.col(self.hash_column).str.json_decode(pl.List(_IMAGE)),
        )
        numbers = pl.int_ranges(0, pl.col("image").list.len(), dtype=pl.Int32)
        each = images.with_columns(number=numbers).explode("image", "number").unnest("image")
        return each.rename({"hash": "content_hash"})

    def inputs(self, entries: RecipeEntries, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `SideInput.inputs`."""
        return {**vars(entries.latent_inputs(row)), "posterior": "mean"}

    def tensors(self, entries: RecipeEntries, target_size: Size) -> dict[str, TensorSpec]:
        """See `SideInput.tensors`."""
        return {LATENT: TensorSpec(entries.recipe.latents.dtype, entries.family.latent_shape(target_size))}

    def recorded(self, table: pl.DataFrame | None) -> pl.DataFrame:
        """See `SideInput.recorded`."""
        if table is None or self.keys_column not in table.columns:
            return pl.DataFrame(schema=RECORDED)

        rows: list[tuple[Any, ...]] = []

        # Rows of samples without such files have nulls.
        columns = table.select(*VIEW, self.hash_column, self.keys_column, self.stats_column).drop_nulls()
        for *view, images, keys, stats in columns.iter_rows():
            of_row = zip(json.loads(images), keys.split(), json.loads(stats), strict=True)
            rows += [(*view, n, image["hash"], key, *stat) for n, (image, key, stat) in enumerate(of_row)]
        return pl.DataFrame(rows, schema=RECORDED, orient="row")

    def with_entries(self, requests: pl.DataFrame, rows: pl.DataFrame, entries: pl.DataFrame) -> pl.DataFrame:
        """See `SideInput.with_entries`."""
        # Concatenated in Polars, because a Python loop over a million rows takes many seconds.
        stats = pl.concat_list(pl.col(name).cast(pl.String) for name in STAT_COLUMNS).list.join(",")
        recorded = rows.join(entries, on="key", how="left", maintain_order="left")
        by_row = recorded.group_by("row", maintain_order=True).agg(
            pl.col("key").str.join(" ").alias(self.keys_column),
            pl.format("[{}]", pl.format("[{}]", stats).str.join(",")).alias(self.stats_column),
        )
        return requests.join(by_row, on="row", how="left", maintain_order="left")


def mean_entries(entries: RecipeEntries) -> RecipeEntries:
    """Return the same entries with the mean of the posterior."""
    # The pipelines do not sample images that the denoiser sees.
    latents = entries.recipe.latents.model_copy(update={"posterior": "mean"})
    of_mean = copy(entries)
    of_mean.recipe = entries.recipe.model_copy(update={"latents": latents})
    return of_mean
