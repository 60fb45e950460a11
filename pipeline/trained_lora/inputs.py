"""The samples of a run: the tables of both caches joined into one table of training inputs.

The plan picks one caption and one latent (plain or mirrored) of an input in every epoch. With
`buckets.per_image: each`, each bucket of a sample is a separate input with its own `variant_id`.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, overload

import polars as pl

from pipeline.aspect_buckets.slider_pairs import slider_scales, with_pairs
from pipeline.cache.recipe_entries import SEEN, TARGET
from pipeline.cache.store import EntrySpec, TensorSpec
from pipeline.errors import RUN_RECIPE, TrainingError, counted
from pipeline.images.geometry import Size
from pipeline.side_inputs import MASKS, REFERENCES, SIDE_INPUTS, SideInput
from pipeline.storage.needed_columns import NEEDED
from pipeline.storage.tables import read_rows, selected, write_rows
from pipeline.text_embeddings.caption_rows import EMPTY_CAPTION, with_seen_images
from pipeline.validated_dataset.holdout import held_out

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.recipe import Recipe
    from pipeline.trained_lora.plan.mixing import Exhausted


@dataclass(frozen=True, slots=True)
class CaptionVariant:
    """One caption of a sample and its cache entry."""

    caption: str
    entry: EntrySpec


@dataclass(frozen=True, slots=True)
class LatentView:
    """One latent of a sample, its side inputs, and its crop's (top, left) in the resized image.

    Side inputs and crop are mirrored if the latent is. `side_inputs` has the entries of the files of each
    side input, such as "references", in the recipe's order.
    """

    entry: EntrySpec
    crop_top_left: tuple[int, int]
    side_inputs: Mapping[str, tuple[EntrySpec, ...]] = field(default_factory=dict[str, tuple[EntrySpec, ...]])

    @property
    def mask(self) -> EntrySpec | None:
        """Entry of the mask, if the sample has one."""
        return next(iter(self.side_inputs.get(MASKS.plural, ())), None)

    @property
    def references(self) -> tuple[EntrySpec, ...]:
        """Entries of the references, in the recipe's order."""
        return self.side_inputs.get(REFERENCES.plural, ())

    @property
    def images(self) -> tuple[EntrySpec, ...]:
        """Entries of all images that the denoiser sees next to the latent."""
        files = (entry for entries in self.side_inputs.values() for entry in entries)
        return tuple(entry for entry in files if entry.kind == "latents")


@dataclass(frozen=True, slots=True)
class TrainingInput:
    """One sample in one bucket. Sizes are (height, width) and positions (top, left), both in pixels.

    Attributes:
        variant_id: The sample_id, followed by " (<bucket>)" if the sample has several buckets.
        bucket: Only inputs of the same bucket share a batch.
        repeats: Number of times an epoch shows the input, at least 1.
        variants: Captions in the order of their variant numbers; at least one.
        views: Latents, plain before mirrored; at least one.
        original_size_hw: Size of the image after EXIF orientation.
        target_size_hw: Size of the bucket.
        held_out: Whether the input is reserved for validation loss and never trained on.
        lora_scale: Factor of the LoRA's effect while it trains on the input.
        pair: Name that a slider's two opposite images share; None if the input has no partner.
        empty_text: Entry of the empty caption with the input's references; None to use the entry of the
            empty caption that all inputs of the job share.
        identity: What the input's order and random numbers depend on, see `identities`.
    """

    variant_id: str
    sample_id: str
    dataset: str
    bucket: str
    repeats: int
    variants: tuple[CaptionVariant, ...]
    views: tuple[LatentView, ...]
    original_size_hw: tuple[int, int]
    target_size_hw: tuple[int, int]
    held_out: bool
    lora_scale: int
    pair: str | None
    empty_text: EntrySpec | None
    identity: str


COLUMNS: dict[str, Any] = {
    "variant_id": pl.String,
    "sample_id": pl.String,
    "dataset": pl.String,
    "bucket": pl.String,
    "repeats": pl.Int32,
    "captions": pl.List(pl.String),
    "texts": pl.List(pl.String),
    "text_tensors": pl.List(pl.String),
    "latents": pl.List(pl.String),
    "latent_tensors": pl.String,
    "crops_top": pl.List(pl.Int32),
    "crops_left": pl.List(pl.Int32),
    "height": pl.Int32,
    "width": pl.Int32,
    "target_height": pl.Int32,
    "target_width": pl.Int32,
    "held_out": pl.Boolean,
}
"""Columns of the table of training inputs, one row per input.

`height` and `width` are the original size. `texts` and `latents` are entry keys, one per caption or view.
`text_tensors` (one per caption) and `latent_tensors` (the same for all views) are written by `tensors_json`.
"""

SIDE_INPUT_COLUMNS: dict[str, dict[str, Any]] = {
    each.plural: {
        each.plural: pl.List(pl.List(pl.String)) if each.several else pl.List(pl.String),
        f"{each.name}_tensors": pl.List(pl.String) if each.several else pl.String,
    }
    for each in SIDE_INPUTS
}
"""Further columns of recipes with side inputs: entry keys by view, and the tensors of the entries.

If an input may have several files, such as references, a view has a list of keys, and there are tensors for
each file. Both columns are null for inputs without such files.
"""

SLIDER_COLUMNS: dict[str, Any] = {"slider": pl.Int8, "pair": pl.String}
"""Further columns of recipes with sliders, see `slider_pairs.with_pairs`.

Two images are a pair only if both are trained on, or both held out.
"""

EMPTY_COLUMNS: dict[str, Any] = {"empty_text": pl.String, "empty_tensors": pl.String}
"""Further columns if the text encoder sees references: key and tensors of the empty caption.

Both are null for inputs without references, which use the empty caption of the job.
"""

IDENTITY = "identity"
"""Further column of inputs that are ordered by content; runs of 0.3.0 and earlier are ordered by name."""


class TrainingInputs(Sequence[TrainingInput]):
    """The training inputs of a run, sorted by identity.

    Attributes:
        table: One row per input, with `COLUMNS`, and `SIDE_INPUT_COLUMNS`, `SLIDER_COLUMNS` and
            `EMPTY_COLUMNS` if the recipe needs them; with `IDENTITY` unless the inputs are ordered by name.
    """

    def __init__(self, table: pl.DataFrame) -> None:
        self.table = table
        self._ids = table["variant_id"]

    @cached_property
    def _sorted_ids(self) -> tuple[pl.Series, pl.Series]:
        """The variant_ids in ascending order, and the index of each."""
        order = self._ids.arg_sort()
        return self._ids.gather(order), order

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, number: int) -> TrainingInput: ...
    @overload
    def __getitem__(self, number: slice) -> TrainingInputs: ...
    def __getitem__(self, number: int | slice) -> TrainingInput | TrainingInputs:
        """Return one input, or the inputs of a slice."""
        if isinstance(number, slice):
            return TrainingInputs(self.table[number])
        # A row becomes an object only when a batch needs it: objects of all rows take far more memory.
        return _input(self.table.row(number, named=True))

    def __iter__(self) -> Iterator[TrainingInput]:
        return map(_input, self.table.iter_rows(named=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainingInputs) and self.table.equals(other.table)

    __hash__ = None  # pyright: ignore[reportAssignmentType] - sequences that compare by value are unhashable

    def number_of(self, variant_id: str) -> int:
        """Return the input's index, from 0.

        Raises:
            KeyError: No input has this variant_id.
        """
        ids, numbers = self._sorted_ids
        place = bisect_left(ids, variant_id)
        if place == len(ids) or ids[place] != variant_id:
            raise KeyError(variant_id)
        return numbers[place]

    def named(self, variant_id: str) -> TrainingInput:
        """Return the input with this variant_id.

        Raises:
            KeyError: No input has this variant_id.
        """
        return self[self.number_of(variant_id)]

    @property
    def is_by_content(self) -> bool:
        """Whether the order and the random numbers of the inputs depend on their contents, not on names."""
        return IDENTITY in self.table.columns

    @property
    def identities(self) -> pl.Series:
        """What the order and the random numbers of each input depend on; unique and in ascending order."""
        return self.table[IDENTITY if self.is_by_content else "variant_id"]

    @property
    def lora_scales(self) -> pl.Series:
        """`lora_scale` of each input."""
        if "slider" not in self.table.columns:
            return pl.repeat(1, len(self), eager=True)
        return self.table["slider"].fill_null(1)

    @property
    def reference_shapes(self) -> pl.Series:
        """Shapes of each input's references in order, as text; "" without references."""
        if "references" not in self.table.columns:
            return pl.repeat("", len(self), eager=True, dtype=pl.String)
        # Many inputs share their shapes, so each distinct text is parsed once.
        texts = self.table["reference_tensors"].list.join("\n").fill_null("")
        return texts.replace_strict({text: shapes_text(text) for text in texts.unique()})

    @property
    def trained(self) -> TrainingInputs:
        """The inputs that are trained on. The run id fixes them and their order, and so their indices."""
        return TrainingInputs(self.table.filter(~pl.col("held_out")))

    @property
    def held_out(self) -> TrainingInputs:
        """The inputs reserved for validation."""
        return TrainingInputs(self.table.filter("held_out"))


def training_inputs(
    recipe: Recipe, entries: RecipeEntries, latents: pl.DataFrame, text: pl.DataFrame
) -> TrainingInputs:
    """Join the tables of both caches into training inputs, sorted by variant_id.

    Raises:
        TrainingError: A sample has a latent but no text embedding, or the recipe lacks its dataset.
    """
    captions = _captions_by_sample(entries, text)
    _require_complete(recipe, latents, captions["sample_id"])

    views = _views_by_bucket(recipe, entries, latents)
    joined = views.join(captions, on="sample_id", how="left")
    columns = COLUMNS
    for side_input in SIDE_INPUTS:
        if side_input.numbers(recipe):
            files = _side_input(side_input, entries, latents)
            joined = joined.join(files, on=["sample_id", "bucket"], how="left")
            columns = {**columns, **SIDE_INPUT_COLUMNS[side_input.plural]}
    if entries.text_images is not None:
        columns = {**columns, **EMPTY_COLUMNS}
    if scales := slider_scales(recipe):
        joined = with_pairs(joined, scales, "held_out")
        columns = {**columns, **SLIDER_COLUMNS}

    # The columns follow from the recipe, whichever samples remain.
    return TrainingInputs(joined.select(columns.keys()).sort("variant_id"))


def when_exhausted(recipe: Recipe, inputs: TrainingInputs) -> Exhausted:
    """Return `training.exhausted`; null means `repeat`, with which the weights are the shares of datasets."""
    if recipe.training.exhausted is not None:
        return recipe.training.exhausted

    # As written: 0.1 and 0.3 are 1 to 3, although their binary values are not.
    weights = {each.name: Fraction(str(each.weight)) for each in recipe.datasets if each.weight is not None}
    draws = inputs.trained.table.group_by("dataset").agg(pl.col("repeats").sum())
    ends = {repeats / weights[name] for name, repeats in draws.iter_rows() if name in weights}

    # Datasets that end together are never exhausted, and all settings give one plan. Its name in run ids is
    # the default of 0.3.0, so that these runs keep their ids.
    return "repeat" if len(ends) > 1 else "leave"


def _require_complete(recipe: Recipe, latents: pl.DataFrame, captioned: pl.Series) -> None:
    datasets = [dataset.name for dataset in recipe.datasets]
    # `implode`, because Polars deprecates `is_in` with a plain series.
    complete = pl.col("dataset").is_in(datasets) & pl.col("sample_id").is_in(captioned.implode())
    incomplete = latents.filter(~complete)["sample_id"].unique().sort()
    if incomplete.is_empty():
        return

    raise TrainingError(
        f"{counted(len(incomplete), 'sample')} without a text embedding, or from a dataset that is not in "
        "the recipe",
        where=incomplete[0],
        fix=f"run the cache job again: {RUN_RECIPE} {recipe.name} --cache-only",
    )


def _views_by_bucket(recipe: Recipe, entries: RecipeEntries, latents: pl.DataFrame) -> pl.DataFrame:
    """Return one row per training input with all of `COLUMNS` but the captions."""
    rows = selected("vae_latents", latents, NEEDED["trained_lora"]["vae_latents"])
    # The plan refers to the views of an input by their place: plain before mirrored.
    rows = rows.sort("sample_id", "bucket", "flipped")
    fractions = {dataset.name: dataset.validation_fraction for dataset in recipe.datasets}
    repeats = {dataset.name: dataset.repeats for dataset in recipe.datasets}

    # A mirrored latent was cropped from the mirrored image, so left becomes right.
    mirrored_left = pl.col("resized_width") - pl.col("crop_left") - pl.col("target_width")
    rows = rows.with_columns(
        entries.latent_keys(rows).alias("latents"),
        held_out(rows, fractions).alias("held_out"),
        crops_top="crop_top",
        crops_left=pl.when("flipped").then(mirrored_left).otherwise("crop_left"),
        repeats=pl.col("dataset").replace_strict(repeats, return_dtype=pl.Int32),
    )

    rows = rows.join(_latent_tensors(entries, rows), on=TARGET, how="left", maintain_order="left")

    # All views of an input are equal in these columns.
    of_all_views = ("dataset", "repeats", "latent_tensors", "height", "width", *TARGET, "held_out")
    inputs = rows.group_by("sample_id", "bucket").agg(
        "latents", "crops_top", "crops_left", pl.col(*of_all_views).first()
    )
    with_bucket = pl.format("{} ({})", "sample_id", "bucket")
    has_several_buckets = pl.len().over("sample_id") > 1
    return inputs.with_columns(
        variant_id=pl.when(has_several_buckets).then(with_bucket).otherwise("sample_id")
    )


def _side_input(side_input: SideInput, entries: RecipeEntries, latents: pl.DataFrame) -> pl.DataFrame:
    """Return one row per training input with such files: their columns, `sample_id` and `bucket`."""
    plural, tensors_column = SIDE_INPUT_COLUMNS[side_input.plural]
    rows = selected("vae_latents", latents, NEEDED["trained_lora"]["vae_latents"])
    each = side_input.entry_rows(entries, rows.sort("sample_id", "bucket", "flipped"))

    # The tensors follow from the size, and a million rows have only a few sizes.
    sizes = each.select(TARGET).unique()
    tensors = [tensors_json(side_input.tensors(entries, Size(*size))) for size in sizes.iter_rows()]
    sizes = sizes.with_columns(pl.Series(tensors_column, tensors, dtype=pl.String))
    each = each.join(sizes, on=TARGET, how="left", maintain_order="left")

    by_view = each.group_by("row", "sample_id", "bucket", maintain_order=True)
    files = pl.col("key").alias(plural), pl.col(tensors_column)
    views = by_view.agg(files if side_input.several else [each.first() for each in files])
    by_input = views.group_by("sample_id", "bucket")
    return by_input.agg(plural, pl.col(tensors_column).first())


def _latent_tensors(entries: RecipeEntries, rows: pl.DataFrame) -> pl.DataFrame:
    sizes = rows.select(TARGET).unique()
    latents = [tensors_json(entries.latent_tensors(Size(*size))) for size in sizes.iter_rows()]
    return sizes.with_columns(pl.Series("latent_tensors", latents, dtype=pl.String))


def _captions_by_sample(entries: RecipeEntries, text: pl.DataFrame) -> pl.DataFrame:
    """Return one row per sample with its `captions`, `texts`, `text_tensors` and perhaps `EMPTY_COLUMNS`."""
    rows = selected("text_embeddings", text, NEEDED["trained_lora"]["text_embeddings"])
    # The plan refers to the captions of an input by their place: the order of their variant numbers.
    rows = with_seen_images(entries, rows).sort("sample_id", "variant")
    tensors = {length: tensors_json(entries.text_tensors(length)) for length in rows["text_length"].unique()}
    rows = rows.with_columns(
        entries.text_keys(rows["caption"], rows.get_column(SEEN, default=None)).alias("texts"),
        text_tensors=pl.col("text_length").replace_strict(tensors, return_dtype=pl.String),
    )
    by_sample = rows.filter(pl.col("variant") > EMPTY_CAPTION).group_by("sample_id", maintain_order=True)
    captions = by_sample.agg("texts", "text_tensors", captions="caption")
    if entries.text_images is None:
        return captions
    empty = rows.filter(pl.col("variant") == EMPTY_CAPTION)
    empty = empty.select("sample_id", empty_text="texts", empty_tensors="text_tensors")
    return captions.join(empty, on="sample_id", how="left", maintain_order="left")


def write_inputs(inputs: TrainingInputs, file: BinaryIO) -> None:
    """Write the table of inputs as Parquet to a binary file."""
    write_rows(inputs.table, file)


def read_inputs(path: Path) -> TrainingInputs:
    """Read the inputs that `write_inputs` wrote."""
    return TrainingInputs(read_rows(path))


def _empty_text(row: Mapping[str, Any]) -> EntrySpec | None:
    key = row.get("empty_text")
    return None if key is None else EntrySpec("text", key, parsed_tensors(row["empty_tensors"]))


def _side_inputs(row: Mapping[str, Any], num_views: int) -> list[dict[str, tuple[EntrySpec, ...]]]:
    views: list[dict[str, tuple[EntrySpec, ...]]] = [{} for _ in range(num_views)]
    for side_input in SIDE_INPUTS:
        keys_column, tensors_column = SIDE_INPUT_COLUMNS[side_input.plural]
        if row.get(keys_column) is None:
            continue
        texts = row[tensors_column] if side_input.several else [row[tensors_column]]
        tensors = [parsed_tensors(text) for text in texts]
        for view, keys in zip(views, row[keys_column], strict=True):
            files = zip(keys if side_input.several else [keys], tensors, strict=True)
            view[side_input.plural] = tuple(EntrySpec(side_input.kind, *file) for file in files)
    return views


def _input(row: Mapping[str, Any]) -> TrainingInput:
    text_entries = [
        EntrySpec("text", key, parsed_tensors(tensors))
        for key, tensors in zip(row["texts"], row["text_tensors"], strict=True)
    ]
    latent_tensors = parsed_tensors(row["latent_tensors"])
    latent_entries = [EntrySpec("latents", key, latent_tensors) for key in row["latents"]]
    crops = zip(row["crops_top"], row["crops_left"], strict=True)
    return TrainingInput(
        variant_id=row["variant_id"],
        sample_id=row["sample_id"],
        dataset=row["dataset"],
        bucket=row["bucket"],
        repeats=row["repeats"],
        variants=tuple(map(CaptionVariant, row["captions"], text_entries)),
        views=tuple(map(LatentView, latent_entries, crops, _side_inputs(row, len(latent_entries)))),
        original_size_hw=(row["height"], row["width"]),
        target_size_hw=(row["target_height"], row["target_width"]),
        held_out=row["held_out"],
        lora_scale=row.get("slider") or 1,
        pair=row.get("pair"),
        empty_text=_empty_text(row),
        identity=row.get(IDENTITY) or row["variant_id"],
    )


def tensors_json(tensors: Mapping[str, TensorSpec]) -> str:
    """Serialize an entry's tensors for `tensors_from_json`: name to dtype, shape and raggedness."""
    return json.dumps({name: astuple(tensor) for name, tensor in tensors.items()})


def tensors_from_json(value: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Convert the parsed JSON of `tensors_json` back."""
    return {name: TensorSpec(dtype, tuple(shape), ragged) for name, (dtype, shape, ragged) in value.items()}


# The distinct texts are as few as buckets and caption lengths.
@lru_cache(maxsize=1_024)
def parsed_tensors(text: str) -> dict[str, TensorSpec]:
    """Parse the text of `tensors_json`."""
    return tensors_from_json(json.loads(text))


def shapes_text(texts: str) -> str:
    """Return `CxHxW CxHxW` for lines of `tensors_json`, one per entry."""
    shapes = [next(iter(parsed_tensors(text).values())).shape for text in texts.splitlines()]
    return " ".join("x".join(map(str, shape)) for shape in shapes)
