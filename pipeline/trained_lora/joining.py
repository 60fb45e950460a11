"""The samples of a run, joined from the tables of the two caches, column by column. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.requests import TARGET
from pipeline.errors import TrainingError, counted
from pipeline.images.geometry import Size
from pipeline.storage.columns import beside
from pipeline.storage.needed_columns import NEEDED
from pipeline.storage.tables import in_order
from pipeline.trained_lora.samples import COLUMNS, TrainingInputs, tensors_json
from pipeline.validated_dataset.holdout import held_out

if TYPE_CHECKING:
    from pipeline.cache.requests import Entries
    from pipeline.recipe import Recipe

_ROWS_AT_ONCE = 5_000

_EDGES = 2**31
_ONE_NUMBER = pl.col(TARGET[0]).cast(pl.Int64) * _EDGES + pl.col(TARGET[1])
"""The target size in one number."""


def training_inputs(
    recipe: Recipe, entries: Entries, latents: pl.DataFrame, text: pl.DataFrame
) -> TrainingInputs:
    """The samples with their entries, sorted by sample_id.

    Args:
        recipe: Names the datasets.
        entries: Of the recipe.
        latents: Table vae_latents, or the columns of it that are `NEEDED`.
        text: Likewise text_embeddings.

    Raises:
        TrainingError: A sample has a latent and no text embedding, or its dataset has left the recipe.
    """
    captions = _captions(entries, text)
    _require_known(recipe, latents, captions["image_id"])
    views = _views(recipe, entries, latents)
    table = beside(views, captions, on="image_id")
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
    rows = in_order(text.select(NEEDED["trained_lora"]["text_embeddings"]), ["sample_id", "variant"])
    tensors = _shared(rows["text_length"], lambda length: tensors_json(entries.text_tensors(length)))
    parts = (
        part.select(
            image_id="sample_id",
            captions="caption",
            texts=_text_keys(entries, part["caption"]),
            text_tensors=tensors[place : place + len(part)],
        )
        for place, part in _parts(rows)
    )
    several = _several(rows, ["sample_id"])
    return _in_lists(parts, ["image_id"] if several else [], ["captions", "texts", "text_tensors"])


def _text_keys(entries: Entries, captions: pl.Series) -> pl.Series:
    """Of each caption; that of captions that are the same is made once."""
    distinct = captions.unique().sort()
    keys = pl.DataFrame({"caption": distinct, "key": entries.text_keys(distinct)})
    return beside(captions.to_frame("caption"), keys, on="caption")["key"]


def _views(recipe: Recipe, entries: Entries, latents: pl.DataFrame) -> pl.DataFrame:
    """A row a sample: all of it but its captions."""
    rows = in_order(latents.select(NEEDED["trained_lora"]["vae_latents"]), ["sample_id", "bucket", "flipped"])
    held = held_out(rows, {each.name: each.validation_fraction for each in recipe.datasets})
    sizes = rows.select(_ONE_NUMBER).to_series()
    tensors = _shared(sizes, lambda size: tensors_json(entries.latent_tensors(Size(*divmod(size, _EDGES)))))
    repeats = {each.name: each.repeats for each in recipe.datasets}
    # Mirrored with the resized image, where the latent is.
    mirrored = pl.col("resized_width") - pl.col("crop_left") - pl.col("target_width")
    parts = (
        part.select(
            *("dataset", "bucket", "height", "width", *TARGET),
            image_id="sample_id",
            latents=entries.latent_keys(part),
            latent_tensors=tensors[place : place + len(part)],
            crops_top="crop_top",
            crops_left=pl.when("flipped").then(mirrored).otherwise("crop_left"),
            repeats=pl.col("dataset").replace_strict(repeats, return_dtype=pl.Int32),
            held_out=held[place : place + len(part)],
        )
        for place, part in _parts(rows)
    )
    by = ["image_id", "bucket"] if _several(rows, ["sample_id", "bucket"]) else []
    samples = _in_lists(parts, by, ["latents", "crops_top", "crops_left"])
    image_id = pl.col("image_id")
    several = (image_id == image_id.shift(1)) | (image_id == image_id.shift(-1))
    if not samples.select(several.any()).item():
        return samples.with_columns(sample_id="image_id")
    name = pl.when(several).then(pl.format("{} ({})", "image_id", "bucket")).otherwise(image_id)
    return samples.with_columns(sample_id=name)


def _parts(rows: pl.DataFrame) -> Iterator[tuple[int, pl.DataFrame]]:
    """Some rows at a time, each with the place of the first of them; of no rows one part.

    A table that was read is in chunks, and no part is of two of them: it shares its columns with the table.
    """
    place = 0
    for length in rows.to_series(0).chunk_lengths():
        for part in rows[place : place + length].iter_slices(_ROWS_AT_ONCE) if length else [rows]:
            yield place, part
            place += len(part)


def _shared(values: pl.Series, text_of: Callable[[Any], str]) -> pl.Series:
    """The text of each value; that of values that are the same is there once."""
    distinct = values.unique(maintain_order=True)
    texts = pl.Series(map(text_of, distinct), dtype=pl.String)
    places = values.replace_strict(distinct, range(len(distinct)), return_dtype=pl.UInt32)
    return texts.gather(places)


def _several(rows: pl.DataFrame, by: list[str]) -> bool:
    """Whether two of the sorted rows are the same in `by`."""
    same = pl.all_horizontal(pl.col(name) == pl.col(name).shift(1) for name in by)
    return rows.select(same.any()).item()


def _in_lists(parts: Iterable[pl.DataFrame], by: list[str], names: list[str]) -> pl.DataFrame:
    """A row for each of the sorted rows that differ in `by`: `names` as lists, of the others the first.

    Args:
        parts: Of the rows.
        by: None where no two are the same: then a row for each.
        names: What becomes lists.
    """
    if not by:
        in_lists = [pl.col(name).reshape((-1, 1)).arr.to_list() for name in names]  # shares what it holds
        return pl.concat(part.with_columns(in_lists) for part in parts)
    rows = pl.concat(parts)
    others = [name for name in rows.columns if name not in (*by, *names)]
    first = [pl.col(name).first() for name in others]
    return rows.group_by(by, maintain_order=True).agg(*names, *first)
