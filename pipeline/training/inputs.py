"""The samples of a run: what the tables say of each, joined, with the store entries that training reads.

A sample may have several captions, its variants, and several latents, its views: as it is, and mirrored. The
plan draws one of each anew for every epoch. An image that has several buckets, one a resolution, is as many
samples here: it is shown once an epoch in each. Torch-free.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.counting import counted
from pipeline.errors import TrainingError
from pipeline.split import held_out
from pipeline.store import EntrySpec, TensorSpec
from pipeline.tables import in_order

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.entries import Entries
    from pipeline.recipe import Recipe

Row = dict[str, Any]

_ROWS_AT_ONCE = 5_000


@dataclass(frozen=True, slots=True)
class CaptionVariant:
    """One of a sample's captions, and its entry."""

    caption: str
    entry: EntrySpec


@dataclass(frozen=True, slots=True)
class LatentView:
    """One of a sample's latents, and where its crop lies in the resized image, mirrored with it if it is."""

    entry: EntrySpec
    crop_top_left: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TrainingInput:
    """One sample as training sees it; sizes and positions are (height, width) or (top, left) in pixels.

    Attributes:
        sample_id: Which; of an image with several buckets, with the bucket in brackets after it.
        image_id: The sample_id of the tables.
        dataset: Whose.
        bucket: Who may share a batch with it.
        repeats: How often an epoch shows it, >= 1.
        variants: At least one, by the number of the variant.
        views: At least one; as it is before mirrored.
        original_size_hw: After EXIF orientation.
        target_size_hw: The bucket's.
        held_out: Whether it is for validation, and never trained on.
    """

    sample_id: str
    image_id: str
    dataset: str
    bucket: str
    repeats: int
    variants: tuple[CaptionVariant, ...]
    views: tuple[LatentView, ...]
    original_size_hw: tuple[int, int]
    target_size_hw: tuple[int, int]
    held_out: bool = False


def training_inputs(
    recipe: Recipe, entries: Entries, latents: pl.DataFrame, text: pl.DataFrame
) -> tuple[TrainingInput, ...]:
    """The samples with their entries, sorted by sample_id.

    Raises:
        TrainingError: A sample has a latent and no text embedding, or its dataset has left the recipe.
    """
    datasets = {dataset.name: dataset for dataset in recipe.datasets}
    known = pl.col("sample_id").is_in(text["sample_id"].implode()) & pl.col("dataset").is_in(list(datasets))
    missing = latents.filter(~known)["sample_id"].unique().sort()
    if len(missing):
        fix = f"run the cache job again: dagster job execute -m assets.definitions -j {recipe.name}_cache"
        samples = counted(len(missing), "sample has", "samples have")
        what = f"{samples} no text embedding, or a dataset that the recipe does not name"
        raise TrainingError(what, where=missing[0], fix=fix)
    captions = _variants(entries, text)
    fractions = {name: dataset.validation_fraction for name, dataset in datasets.items()}
    apart = latents.select(*_ROW, held_out=held_out(latents, fractions))
    sizes = dict[tuple[int, int], tuple[int, int]]()

    def shared(size_hw: tuple[int, int]) -> tuple[int, int]:
        return sizes.setdefault(size_hw, size_hw)  # a hundred thousand samples have few

    inputs: list[TrainingInput] = []
    for image_id, of_image in groupby(_latent_rows(entries, apart), itemgetter("sample_id")):
        of_buckets = [list(rows) for _, rows in groupby(of_image, itemgetter("bucket"))]
        for rows in of_buckets:
            first = rows[0]
            inputs.append(
                TrainingInput(
                    sample_id=image_id if len(of_buckets) == 1 else f"{image_id} ({first['bucket']})",
                    image_id=image_id,
                    dataset=first["dataset"],
                    bucket=first["bucket"],
                    repeats=datasets[first["dataset"]].repeats,
                    variants=captions[image_id],
                    views=tuple(LatentView(row["entry"], shared(_crop_top_left(row))) for row in rows),
                    original_size_hw=shared((first["height"], first["width"])),
                    target_size_hw=shared((first["target_height"], first["target_width"])),
                    held_out=first["held_out"],
                )
            )
    inputs.sort(key=attrgetter("sample_id"))
    return tuple(inputs)


def _variants(entries: Entries, text: pl.DataFrame) -> dict[str, tuple[CaptionVariant, ...]]:
    one_each = dict[str, CaptionVariant]()
    distinct = text.select("caption", "text_length").unique("caption")
    for part in distinct.iter_slices(_ROWS_AT_ONCE):
        captions = part["caption"].to_list()
        specs = entries.texts(captions, part["text_length"].to_list())
        one_each |= zip(captions, map(CaptionVariant, captions, specs), strict=True)
    rows = in_order(text.select("sample_id", "variant", "caption"), ["sample_id", "variant"])
    return {
        sample_id: tuple(one_each[caption] for _, _, caption in of_sample)
        for sample_id, of_sample in groupby(rows.iter_rows(), itemgetter(0))
    }


_ROW = (
    *("sample_id", "dataset", "bucket", "content_hash", "height", "width"),
    *("resized_height", "resized_width", "crop_top", "crop_left", "target_height", "target_width", "flipped"),
)
"""Of vae_latents: what a sample is told by, and what decides its entry."""


def _latent_rows(entries: Entries, latents: pl.DataFrame) -> Iterator[Row]:
    """Each row with its `entry`, those of a sample together; what many rows share is one object."""
    for part in in_order(latents, ["sample_id", "bucket", "flipped"]).iter_slices(_ROWS_AT_ONCE):
        specs = entries.latents(part)
        for row, spec in zip(part.drop("content_hash").iter_rows(named=True), specs, strict=True):
            row["dataset"], row["bucket"] = sys.intern(row["dataset"]), sys.intern(row["bucket"])
            row["entry"] = spec
            yield row


def _crop_top_left(row: Row) -> tuple[int, int]:
    """Mirrored with the resized image, where the latent is."""
    left = row["crop_left"]
    if row["flipped"]:
        left = row["resized_width"] - row["crop_left"] - row["target_width"]
    return row["crop_top"], left


_COLUMNS: dict[str, Any] = {
    "sample_id": pl.String,
    "image_id": pl.String,
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
    "original_size_hw": pl.List(pl.Int32),
    "target_size_hw": pl.List(pl.Int32),
    "held_out": pl.Boolean,
}
"""`latents` and `texts` are keys; `*_tensors` are JSON, of each variant, and of all views of a sample."""


def as_frame(inputs: Iterable[TrainingInput]) -> pl.DataFrame:
    """One row a sample, for `from_frame`."""
    return pl.DataFrame([_row(item) for item in inputs], schema=_COLUMNS)


def from_frame(frame: pl.DataFrame) -> tuple[TrainingInput, ...]:
    """The inverse of `as_frame`."""
    return tuple(_input(row) for row in frame.iter_rows(named=True))


def tensors_json(spec: EntrySpec) -> str:
    """The entry's tensors, names to dtype, shape and whether it is ragged, for `spec_of`."""
    return json.dumps({name: astuple(tensor) for name, tensor in spec.tensors.items()})


def spec_of(value: Mapping[str, Any]) -> EntrySpec:
    """The entry of `kind` and `key` whose `tensors` are as `tensors_json` has them, parsed."""
    tensors = {
        name: TensorSpec(dtype, tuple(shape), ragged)
        for name, (dtype, shape, ragged) in value["tensors"].items()
    }
    return EntrySpec(kind=value["kind"], key=value["key"], tensors=tensors)


def _row(item: TrainingInput) -> Row:
    return {
        "sample_id": item.sample_id,
        "image_id": item.image_id,
        "dataset": item.dataset,
        "bucket": item.bucket,
        "repeats": item.repeats,
        "captions": [variant.caption for variant in item.variants],
        "texts": [variant.entry.key for variant in item.variants],
        "text_tensors": [tensors_json(variant.entry) for variant in item.variants],
        "latents": [view.entry.key for view in item.views],
        "latent_tensors": tensors_json(item.views[0].entry),
        "crops_top": [view.crop_top_left[0] for view in item.views],
        "crops_left": [view.crop_top_left[1] for view in item.views],
        "original_size_hw": item.original_size_hw,
        "target_size_hw": item.target_size_hw,
        "held_out": item.held_out,
    }


def _input(row: Mapping[str, Any]) -> TrainingInput:
    latent_tensors = json.loads(row["latent_tensors"])
    texts = [
        spec_of({"kind": "text", "key": key, "tensors": json.loads(tensors)})
        for key, tensors in zip(row["texts"], row["text_tensors"], strict=True)
    ]
    latents = [spec_of({"kind": "latents", "key": key, "tensors": latent_tensors}) for key in row["latents"]]
    crops = zip(row["crops_top"], row["crops_left"], strict=True)
    return TrainingInput(
        sample_id=row["sample_id"],
        image_id=row["image_id"],
        dataset=row["dataset"],
        bucket=row["bucket"],
        repeats=row["repeats"],
        variants=tuple(map(CaptionVariant, row["captions"], texts)),
        views=tuple(map(LatentView, latents, crops)),
        original_size_hw=pair(row["original_size_hw"]),
        target_size_hw=pair(row["target_size_hw"]),
        held_out=row["held_out"],
    )


def pair(values: list[int]) -> tuple[int, int]:
    """Two numbers as JSON and Parquet have them."""
    first, second = values
    return first, second


def keys_named(file: Path) -> set[str]:
    """Of the entries that the samples in `file`, written from `as_frame`, are trained on."""
    keys = pl.read_parquet(file, columns=["latents", "texts"])
    return set(keys["latents"].explode()) | set(keys["texts"].explode())
