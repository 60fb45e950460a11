"""Masks: weights of the loss by place, from the grey values of a file or the opacity of the image.

A mask is resized, cropped and mirrored like its image. Its entry holds one weight for each latent value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import polars as pl

from pipeline.cache.entry_format import MASK
from pipeline.cache.keys import KeyTemplate, MaskInputs, preprocessing_json, preprocessing_of
from pipeline.cache.recipe_entries import STATS, TARGET, RecipeEntries
from pipeline.cache.store import TensorSpec
from pipeline.images.decode import limits_of_recipe
from pipeline.images.failures import changed_error
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Geometry, Size
from pipeline.images.mask import MaskSource, read_mask
from pipeline.recipe import MaskSettings
from pipeline.side_inputs.side_input import GEOMETRY, RECORDED, VIEW, Row, SideInput

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.recipe.datasets import SideInputSettings

MASK_DTYPE = "float16"
"""Dtype of stored weights; half a level of a mask is four times its precision."""

MEAN = "mask_ppm"
"""Column of vae_latents with the mean weight within the crop, in millionths; encoding adds it to an entry."""

_RECORDED_STATS = {name: f"mask_{name}" for name in STATS}
"""Columns of an entry's stat, and their names in vae_latents."""


@dataclass(frozen=True, eq=False)
class Masks(SideInput):
    """The description of masks."""

    def reads_as(self, settings: SideInputSettings) -> str:
        """Return "file", or "alpha" for the opacity of the image: a `MaskSource`."""
        return settings.from_ or "file" if isinstance(settings, MaskSettings) else "file"

    def sources(self, recipe: Recipe) -> dict[str, MaskSource]:
        """Return the origin of the masks of each dataset that has masks, by the dataset's name."""
        return {
            dataset.name: cast("MaskSource", self.reads_as(settings))
            for dataset in recipe.datasets
            for settings in self.sections(dataset)
        }

    def read(self, recipe: Recipe, opened: BinaryIO, kind: str) -> Row:
        """See `SideInput.read`."""
        content = read_mask(opened, cast("MaskSource", kind), limits=limits_of_recipe(recipe.checks))
        return {**content.size._asdict(), "mean": content.mean, "decoding": content.decoding}

    def columns(self, image: Row, files: Sequence[Row]) -> Row:
        """See `SideInput.columns`."""
        (mask,) = files
        # A mask from the image itself: its opacity, read after the scan read the pixels.
        if mask["source"] == "alpha" and mask["hash"] != image["content_hash"]:
            raise changed_error(mask["path"])
        image_size, size = Size(image["height"], image["width"]), Size(mask["height"], mask["width"])
        if size == image_size:
            names = ("path", "hash", "mean", "decoding")
            return {f"mask_{name}": mask[name] for name in names}

        path = mask["path"]
        detail = f"the mask {path} is {size}, and its image is {image_size} (height x width, as displayed)"
        if size == image_size.transposed:
            fix = "rotate the mask as the image is displayed; the image's EXIF orientation rotates it"
            raise ImageError("mask_orientation", detail, fix=fix)
        raise ImageError("mask_size", detail, fix=f"export the mask in the size of the image, {image_size}")

    def hashes(self) -> pl.Expr:
        """See `SideInput.hashes`."""
        return pl.col("mask_hash")

    def entry_rows(self, entries: RecipeEntries, rows: pl.DataFrame) -> pl.DataFrame:
        """See `SideInput.entry_rows`."""
        used = rows.with_row_index("row").filter(self.used(entries.recipe, rows))
        # Checks and the training read no paths, and tables of recipes without masks have no such column.
        path, content_hash, decoding = (
            pl.col(name) if name in used.columns else pl.lit(None, pl.String)
            for name in ("mask_path", "mask_hash", "mask_decoding")
        )
        masks = used.select(
            *("row", "sample_id", "dataset", "bucket", "flipped", *GEOMETRY),
            number=pl.lit(0, pl.Int32),
            path=path,
            content_hash=content_hash,
            decoding=decoding,
        )
        return masks.with_columns(self._keys(entries, masks).alias("key"))

    def _keys(self, entries: RecipeEntries, masks: pl.DataFrame) -> pl.Series:
        if masks.is_empty():
            return pl.Series(dtype=pl.String)

        # All inputs of the first row are common to all rows, except those in these columns.
        inputs = self.inputs(entries, masks.row(0, named=True))
        placeholders: dict[str, Any] = {
            "mask_hash": "@content_hash@",
            "source": "@source@",
            "flip": "@flipped@",
            "resized_size": ["@resized_height@", "@resized_width@"],
            "crop": [f"@{name}@" for name in ("crop_top", "crop_left", *TARGET)],
            "preprocessing_version": "@decoding@",
        }

        # Hashing a template takes about a microsecond per row.
        template = KeyTemplate({"masks": {**inputs, **placeholders}})
        sources = pl.col("dataset").replace_strict(self.sources(entries.recipe), return_dtype=pl.String)
        in_json = {name: pl.col(name).cast(pl.String) for name in template.names}

        # Strings need quotes in JSON; numbers and Booleans do not.
        in_json |= {name: pl.format('"{}"', name) for name in ("content_hash", "source")}
        in_json |= {"decoding": preprocessing_json()}
        return template.hashes(masks.with_columns(source=sources), in_json)

    def inputs(self, entries: RecipeEntries, row: Mapping[str, Any]) -> dict[str, Any]:
        """See `SideInput.inputs`."""
        geometry = Geometry.from_row(row)
        _, latent_height, _ = entries.family.latent_shape(geometry.target_size)
        inputs = MaskInputs(
            mask_hash=row["content_hash"],
            source=self.sources(entries.recipe)[row["dataset"]],
            resized_size=geometry.resized_size,
            crop=geometry.crop,
            flip=bool(row["flipped"]),
            factor=geometry.target_size.height // latent_height,
            preprocessing_version=preprocessing_of(row.get("decoding")),
            dtype=MASK_DTYPE,
        )
        return dict(vars(inputs))

    def tensors(self, entries: RecipeEntries, target_size: Size) -> dict[str, TensorSpec]:
        """Return the tensor of a mask's entry: `MASK` (1, h, w)."""
        _, *size = entries.family.latent_shape(target_size)
        return {MASK: TensorSpec(MASK_DTYPE, (1, *size))}

    def recorded(self, table: pl.DataFrame | None) -> pl.DataFrame:
        """See `SideInput.recorded`; `MEAN` follows."""
        columns = {**RECORDED, MEAN: pl.Int32}
        if table is None or self.keys_column not in table.columns:
            return pl.DataFrame(schema=columns)
        recorded = table.select(
            *VIEW,
            *(pl.col(name).alias(stat) for stat, name in _RECORDED_STATS.items()),
            MEAN,
            number=pl.lit(0, pl.Int32),
            content_hash="mask_hash",
            key=self.keys_column,
        )
        return recorded.drop_nulls().select(columns.keys())

    def with_entries(self, requests: pl.DataFrame, rows: pl.DataFrame, entries: pl.DataFrame) -> pl.DataFrame:
        """See `SideInput.with_entries`."""
        # The geometry columns of entry rows repeat columns of the table, so only the key is joined.
        recorded = rows.select("row", "key").join(entries, on="key", how="left", maintain_order="left")
        recorded = recorded.rename({"key": self.keys_column, **_RECORDED_STATS})
        return requests.join(recorded, on="row", how="left", maintain_order="left")


MASKS = Masks(
    name="mask",
    plural="masks",
    recipe_key="mask",
    add_file="draw the mask {folder}/{name}.png, white where the image counts",
    hash_column="mask_hash",
    keys_column="mask_key",
    absent=("missing", "ambiguous", "shared", "alpha_missing"),
    kind="masks",
    samples_counter="masked_samples",
    several=False,
    only_geometry=True,
    outdated="its mask is missing or outdated",
    more_facts={"mean": pl.Float64, "decoding": pl.String},
    condition=None,
)
