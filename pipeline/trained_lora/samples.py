"""The samples of a run: what the tables say of each, joined, with the store entries that training reads.

A sample may have several captions, its variants, and several latents, its views: as it is, and mirrored. The
plan draws one of each anew for every epoch. An image that has several buckets, one a resolution, is as many
samples here: it is shown once an epoch in each. Torch-free.

All samples are one table, in memory as in the file that a launched process is given; one of them becomes an
object when a batch asks for it.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, overload

import polars as pl

from pipeline.cache.store import EntrySpec, TensorSpec
from pipeline.storage.tables import only

if TYPE_CHECKING:
    from pathlib import Path


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


COLUMNS: dict[str, Any] = {
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
    "height": pl.Int32,
    "width": pl.Int32,
    "target_height": pl.Int32,
    "target_width": pl.Int32,
    "held_out": pl.Boolean,
}
"""Of the table; `height` and `width` are the original size, `latents` and `texts` keys, `*_tensors` as
`tensors_json` has them: of each variant, and of all views of a sample."""


class TrainingInputs(Sequence[TrainingInput]):
    """The samples of a run, sorted by sample_id.

    Attributes:
        table: One row a sample, with `COLUMNS`.
    """

    def __init__(self, table: pl.DataFrame) -> None:
        """Of the table."""
        self.table = table
        self._ids = table["sample_id"]

    def __len__(self) -> int:
        """How many there are."""
        return len(self.table)

    @overload
    def __getitem__(self, number: int) -> TrainingInput: ...
    @overload
    def __getitem__(self, number: slice) -> TrainingInputs: ...
    def __getitem__(self, number: int | slice) -> TrainingInput | TrainingInputs:
        """One sample, or those of a slice."""
        if isinstance(number, slice):
            return TrainingInputs(self.table[number])
        return _input(self.table.row(number, named=True))

    def __iter__(self) -> Iterator[TrainingInput]:
        """One after the other."""
        return map(_input, self.table.iter_rows(named=True))

    def __eq__(self, other: object) -> bool:
        """Whether all of all samples is the same."""
        return isinstance(other, TrainingInputs) and self.table.equals(other.table)

    __hash__ = None  # pyright: ignore[reportAssignmentType] - as of every sequence that compares by value

    def number_of(self, sample_id: str) -> int:
        """Which of the samples it is, from 0.

        Raises:
            KeyError: None of them.
        """
        number = bisect_left(self._ids, sample_id)
        if number == len(self) or self._ids[number] != sample_id:
            raise KeyError(sample_id)
        return number

    def named(self, sample_id: str) -> TrainingInput:
        """The sample of that sample_id.

        Raises:
            KeyError: None of them.
        """
        return self[self.number_of(sample_id)]

    @property
    def trained(self) -> TrainingInputs:
        """Those that are trained on: the run's id fixes them, their order and so their numbers."""
        return TrainingInputs(only(self.table, ~self.table["held_out"]))

    @property
    def held_out(self) -> TrainingInputs:
        """Those for validation."""
        return TrainingInputs(only(self.table, self.table["held_out"]))


def tensors_json(tensors: Mapping[str, TensorSpec]) -> str:
    """An entry's tensors: names to dtype, shape and whether it is ragged, for `tensors_of`."""
    return json.dumps({name: astuple(tensor) for name, tensor in tensors.items()})


def tensors_of(value: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """The tensors that `tensors_json` wrote, parsed."""
    return {name: TensorSpec(dtype, tuple(shape), ragged) for name, (dtype, shape, ragged) in value.items()}


def keys_named(file: Path) -> set[str]:
    """Of the entries that the samples in `file`, the table of a run's samples, are trained on."""
    keys = pl.read_parquet(file, columns=["latents", "texts"])
    return set(keys["latents"].explode()) | set(keys["texts"].explode())


@lru_cache(maxsize=1_024)
def _tensors(text: str) -> dict[str, TensorSpec]:
    """As `tensors_of`; there are as many as buckets and lengths of captions, however many samples."""
    return tensors_of(json.loads(text))


def _input(row: Mapping[str, Any]) -> TrainingInput:
    latent_tensors = _tensors(row["latent_tensors"])
    texts = [
        EntrySpec("text", key, _tensors(tensors))
        for key, tensors in zip(row["texts"], row["text_tensors"], strict=True)
    ]
    latents = [EntrySpec("latents", key, latent_tensors) for key in row["latents"]]
    crops = zip(row["crops_top"], row["crops_left"], strict=True)
    return TrainingInput(
        sample_id=row["sample_id"],
        image_id=row["image_id"],
        dataset=row["dataset"],
        bucket=row["bucket"],
        repeats=row["repeats"],
        variants=tuple(map(CaptionVariant, row["captions"], texts)),
        views=tuple(map(LatentView, latents, crops)),
        original_size_hw=(row["height"], row["width"]),
        target_size_hw=(row["target_height"], row["target_width"]),
        held_out=row["held_out"],
    )
