"""The samples of a plan, stored as columns because objects take ten times the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
import polars as pl

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PlanSample:
    """One training input. Only inputs of the same `bucket` share a micro-batch; counts are at least 1."""

    variant_id: str
    bucket: str
    repeats: int = 1
    variants: int = 1
    views: int = 1
    dataset: str = ""


_COLUMNS = {
    "variant_id": pl.String,
    "bucket": pl.String,
    "repeats": pl.Int32,
    "variants": pl.Int32,
    "views": pl.Int32,
    "dataset": pl.String,
}


class Groups:
    """A partition of the samples, such as by bucket.

    Attributes:
        names: Names of the non-empty groups, sorted.
        codes: Index into `names` for each sample.
    """

    def __init__(self, of_each: pl.Series) -> None:
        """Build the partition from the group name of each sample."""
        self.names: list[str] = of_each.unique().sort().to_list()
        self.codes: Ints = of_each.cast(pl.Enum(self.names)).to_physical().to_numpy().astype(np.int32)

    def members(self, name: str) -> Ints:
        """Return the indices of the group's samples in ascending order."""
        return np.flatnonzero(self.codes == self.names.index(name)).astype(np.int32)


class PlanSamples(Sequence[PlanSample]):
    """The samples, sorted by variant_id; a `place` is an index into them.

    Attributes:
        repeats: Repeats of each sample.
        variants: Number of captions of each sample.
        views: Number of latents of each sample.
        buckets: Partition of the samples by bucket.
        datasets: Partition of the samples by dataset.
    """

    def __init__(self, table: pl.DataFrame) -> None:
        """Take a table with one column per attribute of `PlanSample`, in any row order."""
        table = table.select(pl.col(name).cast(kind) for name, kind in _COLUMNS.items()).sort("variant_id")
        self._ids = table["variant_id"]
        self.repeats: Ints = table["repeats"].to_numpy()
        self.variants: Ints = table["variants"].to_numpy()
        self.views: Ints = table["views"].to_numpy()
        self.buckets = Groups(table["bucket"])
        self.datasets = Groups(table["dataset"])

    @classmethod
    def of(cls, samples: Iterable[PlanSample]) -> PlanSamples:
        """Build from single samples in any order."""
        return cls(pl.DataFrame(map(astuple, samples), schema=_COLUMNS, orient="row"))

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> PlanSample: ...
    @overload
    def __getitem__(self, place: slice) -> list[PlanSample]: ...
    def __getitem__(self, place: int | slice) -> PlanSample | list[PlanSample]:
        """Return one sample, or those of a slice."""
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        return PlanSample(
            variant_id=self._ids[place],
            bucket=self.buckets.names[self.buckets.codes[place]],
            repeats=int(self.repeats[place]),
            variants=int(self.variants[place]),
            views=int(self.views[place]),
            dataset=self.datasets.names[self.datasets.codes[place]],
        )

    def ids_at(self, places: Ints) -> Iterator[str]:
        """Iterate over the variant_ids at these indices, in their order."""
        return iter(self._ids.gather(places))

    def duplicates(self) -> list[str]:
        """Return each variant_id that occurs more than once."""
        later = self._ids[1:]
        return later.filter(later == self._ids[:-1]).unique(maintain_order=True).to_list()
