"""The samples of a run, joined from the tables of the two caches, column by column. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from pipeline.counting import counted
from pipeline.entries import TARGET
from pipeline.errors import TrainingError
from pipeline.geometry import Size
from pipeline.split import held_out
from pipeline.tables import in_order
from pipeline.training.inputs import COLUMNS, TrainingInputs, tensors_json

if TYPE_CHECKING:
    from pipeline.entries import Entries
    from pipeline.recipe import Recipe

_ROWS_AT_ONCE = 5_000

_OF_LATENTS = (
    *("sample_id", "dataset", "bucket", "content_hash", "height", "width"),
    *("resized_height", "resized_width", "crop_top", "crop_left", *TARGET, "flipped"),
)
"""Of vae_latents: what a sample is told by, and what decides its entry."""

_OF_TEXT = ("sample_id", "variant", "caption", "text_length")
"""Likewise of text_embeddings."""


def training_inputs(
    recipe: Recipe, entries: Entries, latents: pl.DataFrame, text: pl.DataFrame
) -> TrainingInputs:
    """The samples with their entries, sorted by sample_id.

    Raises:
        TrainingError: A sample has a latent and no text embedding, or its dataset has left the recipe.
    """
    captions = _captions(entries, text)
    _require_known(recipe, latents, captions["image_id"])
    fractions = {each.name: each.validation_fraction for each in recipe.datasets}
    views = _views(entries, latents.select(*_OF_LATENTS, held_out=held_out(latents, fractions)))
    if views["image_id"].equals(captions["image_id"]):
        table = views.hstack(captions.drop("image_id"))
    else:
        table = views.join(captions, on="image_id", how="left", maintain_order="left")
    repeats = {each.name: each.repeats for each in recipe.datasets}
    table = table.with_columns(repeats=pl.col("dataset").replace_strict(repeats, return_dtype=pl.Int32))
    return TrainingInputs(in_order(table.select(COLUMNS.keys()), ["sample_id"]))


def _require_known(recipe: Recipe, latents: pl.DataFrame, with_text: pl.Series) -> None:
    datasets = [dataset.name for dataset in recipe.datasets]
    images = latents["sample_id"]
    known = latents["dataset"].is_in(datasets)
    if not images.equals(with_text):
        known &= images.is_in(with_text.implode())
    if known.all():
        return
    missing = images.filter(~known).unique().sort()
    fix = f"run the cache job again: dagster job execute -m assets.definitions -j {recipe.name}_cache"
    samples = counted(len(missing), "sample has", "samples have")
    what = f"{samples} no text embedding, or a dataset that the recipe does not name"
    raise TrainingError(what, where=missing[0], fix=fix)


def _captions(entries: Entries, text: pl.DataFrame) -> pl.DataFrame:
    """A row an image: its `captions` by the number of the variant, `texts` (keys) and `text_tensors`."""
    rows = in_order(text.select(_OF_TEXT), ["sample_id", "variant"])
    lengths = rows["text_length"].unique().sort()
    tensors = [tensors_json(entries.text_tensors(length)) for length in lengths]
    of_length = pl.DataFrame({"text_length": lengths, "text_tensors": pl.Series(tensors, dtype=pl.String)})
    keys = [_text_keys(entries, part["caption"]) for part in rows.iter_slices(_ROWS_AT_ONCE)]
    rows = rows.with_columns(texts=pl.concat(keys) if keys else pl.Series(dtype=pl.String))
    rows = rows.join(of_length, on="text_length", how="left", maintain_order="left")
    named = rows.select(
        pl.col("sample_id").alias("image_id"), pl.col("caption").alias("captions"), "texts", "text_tensors"
    )
    return _in_lists(named, ["image_id"], ["captions", "texts", "text_tensors"])


def _text_keys(entries: Entries, captions: pl.Series) -> pl.Series:
    """Of each caption; that of captions that are the same is made once."""
    distinct = captions.unique().sort()
    keys = pl.DataFrame({"caption": distinct, "key": entries.text_keys(distinct)})
    return captions.to_frame("caption").join(keys, on="caption", how="left", maintain_order="left")["key"]


def _views(entries: Entries, rows: pl.DataFrame) -> pl.DataFrame:
    """A row a sample: all of it but its captions and repeats."""
    rows = in_order(rows, ["sample_id", "bucket", "flipped"])
    # Mirrored with the resized image, where the latent is.
    mirrored = pl.col("resized_width") - pl.col("crop_left") - pl.col("target_width")
    rows = rows.select(
        "dataset",
        "bucket",
        "held_out",
        image_id="sample_id",
        latents=entries.latent_keys(rows),
        crops_top="crop_top",
        crops_left=pl.when("flipped").then(mirrored).otherwise("crop_left"),
        original_size_hw=pl.concat_list("height", "width"),
        target_size_hw=pl.concat_list(*TARGET),
        latent_tensors=_latent_tensors(entries, rows),
    )
    samples = _in_lists(rows, ["image_id", "bucket"], ["latents", "crops_top", "crops_left"])
    image_id = pl.col("image_id")
    several = (image_id == image_id.shift(1)) | (image_id == image_id.shift(-1))
    name = pl.when(several).then(pl.format("{} ({})", "image_id", "bucket")).otherwise(image_id)
    several_buckets = samples.select(several.any()).item()
    return samples.with_columns(sample_id=name if several_buckets else image_id)


def _latent_tensors(entries: Entries, rows: pl.DataFrame) -> pl.Series:
    """Of each row, in JSON; as many texts as there are target sizes."""
    targets = rows.select(TARGET).unique()
    tensors = [tensors_json(entries.latent_tensors(Size(*target))) for target in targets.iter_rows()]
    of_target = targets.with_columns(tensors=pl.Series(tensors, dtype=pl.String))
    joined = rows.select(TARGET).join(of_target, on=TARGET, how="left", maintain_order="left")
    return joined["tensors"]


def _in_lists(rows: pl.DataFrame, by: list[str], names: list[str]) -> pl.DataFrame:
    """A row for each of the sorted rows that differ in `by`: `names` as lists, of the others the first."""
    same = pl.all_horizontal(pl.col(name) == pl.col(name).shift(1) for name in by)
    if not rows.select(same.any()).item():
        return rows.with_columns(pl.concat_list(name) for name in names)
    others = [name for name in rows.columns if name not in (*by, *names)]
    first = [pl.col(name).first() for name in others]
    return rows.group_by(by, maintain_order=True).agg(*names, *first)
