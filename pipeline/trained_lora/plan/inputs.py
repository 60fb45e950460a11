"""The training inputs of a plan, stored as columns because objects take ten times the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
import polars as pl

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PlanInput:
    """One training input; counts are at least 1.

    Only inputs of the same `bucket`, `references` and `slider` share a micro-batch. `references` is any text
    that identifies number and shapes of reference images, and "" for an input without. `slider` is 1 or
    -1, or None for an input that is not part of a slider. Order and random choices depend on `identity`, or
    on the variant_id if it is None. Inputs of the same `pair` get the same random choices.
    """

    variant_id: str
    bucket: str
    repeats: int = 1
    variants: int = 1
    views: int = 1
    dataset: str = ""
    slider: int | None = None
    pair: str | None = None
    references: str = ""
    identity: str | None = None


_COLUMNS = {
    "variant_id": pl.String,
    "bucket": pl.String,
    "repeats": pl.Int32,
    "variants": pl.Int32,
    "views": pl.Int32,
    "dataset": pl.String,
    "slider": pl.Int8,
    "pair": pl.String,
    "references": pl.String,
    "identity": pl.String,
}

_SLIDER, _OPPOSITE = " slider", " (opposite)"
"""Endings of the names of a bucket's groups: `_SLIDER` for 1, and both for -1."""


def turn_name(group: str) -> str:
    """Return the name that decides the turns of a group's micro-batches."""
    # The same for both sides of a slider, so that their micro-batches alternate.
    return group.removesuffix(_OPPOSITE)


class Groups:
    """A partition of the inputs, such as by bucket.

    Attributes:
        names: Names of the non-empty groups, sorted.
        codes: Index into `names` for each input.
    """

    def __init__(self, of_each: pl.Series) -> None:
        self.names: list[str] = of_each.unique().sort().to_list()
        self.codes: Ints = of_each.cast(pl.Enum(self.names)).to_physical().to_numpy().astype(np.int32)

    def members(self, name: str) -> Ints:
        """Return the indices of the group's inputs in ascending order."""
        return np.flatnonzero(self.codes == self.names.index(name)).astype(np.int32)


class PlanInputs(Sequence[PlanInput]):
    """The inputs, sorted by identity; a `place` is an index into them.

    Attributes:
        repeats: Repeats of each input.
        variants: Number of captions of each input.
        views: Number of latents of each input.
        buckets: Partition of the inputs by bucket, and within it by `references` and `slider`.
        datasets: Partition of the inputs by dataset.
    """

    def __init__(self, table: pl.DataFrame) -> None:
        """Take a table with one column per attribute of `PlanInput`, in any row order.

        `slider`, `pair`, `references` and `identity` may be missing.
        """
        if "slider" not in table.columns:
            table = table.with_columns(slider=None, pair=None)
        if "references" not in table.columns:
            table = table.with_columns(references=pl.lit(""))
        if "identity" not in table.columns:
            table = table.with_columns(identity=None)
        table = table.select(pl.col(name).cast(kind) for name, kind in _COLUMNS.items())
        table = table.sort(pl.coalesce("identity", "variant_id"))
        self._ids = table["variant_id"]
        self._identities = table["identity"]
        self._sliders = table["slider"]
        self._pairs = table["pair"]
        self._random_names = table.select(pl.coalesce("pair", "identity", "variant_id")).to_series()
        self.repeats: Ints = table["repeats"].to_numpy()
        self.variants: Ints = table["variants"].to_numpy()
        self.views: Ints = table["views"].to_numpy()
        side = pl.col("slider").replace_strict({1: _SLIDER, -1: _SLIDER + _OPPOSITE}, default="")
        self._buckets = table["bucket"]
        self._references = table["references"]
        # Without references the names have no suffix, so that plans stay the same.
        references = pl.when(pl.col("references") != "").then(pl.lit(" ") + pl.col("references"))
        group = pl.col("bucket") + references.otherwise(pl.lit("")) + side
        self.buckets = Groups(table.select(group).to_series())
        self.datasets = Groups(table["dataset"])

    @classmethod
    def of(cls, inputs: Iterable[PlanInput]) -> PlanInputs:
        """Build from single inputs in any order."""
        return cls(pl.DataFrame(map(astuple, inputs), schema=_COLUMNS, orient="row"))

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> PlanInput: ...
    @overload
    def __getitem__(self, place: slice) -> list[PlanInput]: ...
    def __getitem__(self, place: int | slice) -> PlanInput | list[PlanInput]:
        """Return one input, or a list of the inputs in a slice."""
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        return PlanInput(
            variant_id=self._ids[place],
            bucket=self._buckets[place],
            repeats=int(self.repeats[place]),
            variants=int(self.variants[place]),
            views=int(self.views[place]),
            dataset=self.datasets.names[self.datasets.codes[place]],
            slider=self._sliders[place],
            pair=self._pairs[place],
            references=self._references[place],
            identity=self._identities[place],
        )

    def ids_at(self, places: Ints) -> Iterator[str]:
        """Iterate over the variant_ids at these indices, in their order."""
        return iter(self._ids.gather(places))

    def random_names_at(self, places: Ints) -> Iterator[str]:
        """Iterate over the names that random choices depend on: the pair's, or else the input's own."""
        return iter(self._random_names.gather(places))

    def duplicates(self) -> list[str]:
        """Return each variant_id that occurs more than once."""
        return self._ids.filter(self._ids.is_duplicated()).unique().sort().to_list()
