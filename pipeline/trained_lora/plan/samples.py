"""The samples as a plan sees them, kept as columns: as objects they take ten times the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
import polars as pl

Ints = npt.NDArray[np.int32]

_IDS_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class PlanSample:
    """One sample as the plan sees it: `bucket` decides who may share a micro-batch, counts are >= 1."""

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
    """What divides the samples, such as their buckets.

    Attributes:
        names: Of the groups that have samples, sorted.
        codes: Of each sample the place of its group's name.
    """

    def __init__(self, of_each: pl.Series) -> None:
        """By the name of each sample's group."""
        self.names: list[str] = of_each.unique().sort().to_list()
        self.codes: Ints = of_each.cast(pl.Enum(self.names)).to_physical().to_numpy().astype(np.int32)

    def members(self, name: str) -> Ints:
        """The places of the group's samples, ascending."""
        return np.flatnonzero(self.codes == self.names.index(name)).astype(np.int32)


class PlanSamples(Sequence[PlanSample]):
    """The samples, sorted by variant_id; a place is an index into them.

    Attributes:
        repeats: Of each, as `PlanSample`.
        variants: Likewise.
        views: Likewise.
        buckets: Which samples are in which.
        datasets: Likewise.
    """

    def __init__(self, table: pl.DataFrame) -> None:
        """Of a table with a column for each attribute of `PlanSample`, in any order."""
        table = table.select(pl.col(name).cast(kind) for name, kind in _COLUMNS.items()).sort("variant_id")
        self._ids = table["variant_id"]
        self.repeats: Ints = table["repeats"].to_numpy()
        self.variants: Ints = table["variants"].to_numpy()
        self.views: Ints = table["views"].to_numpy()
        self.buckets = Groups(table["bucket"])
        self.datasets = Groups(table["dataset"])

    @classmethod
    def of(cls, samples: Iterable[PlanSample]) -> PlanSamples:
        """Of single samples, in any order."""
        return cls(pl.DataFrame(map(astuple, samples), schema=_COLUMNS, orient="row"))

    def __len__(self) -> int:
        """How many there are."""
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> PlanSample: ...
    @overload
    def __getitem__(self, place: slice) -> list[PlanSample]: ...
    def __getitem__(self, place: int | slice) -> PlanSample | list[PlanSample]:
        """One sample, or those of a slice."""
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
        """The variant_ids at these places, in their order."""
        for start in range(0, len(places), _IDS_AT_ONCE):
            yield from self._ids.gather(places[start : start + _IDS_AT_ONCE])

    def twice(self) -> list[str]:
        """The variant_ids that stand there more than once, each once."""
        later = self._ids[1:]
        return later.filter(later == self._ids[:-1]).unique(maintain_order=True).to_list()
