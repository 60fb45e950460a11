"""Datasets, cache_dir and output_dir lie apart: checked before any work, by any spelling, without writing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from pipeline.addresses import Address
from pipeline.errors import PathIsolationError
from pipeline.paths.identity import Identified, identify
from pipeline.paths.links import Lead, leads_back, leads_out

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

Relation = Literal["same", "inside", "contains", "link"]

MAX_LINKS_NAMED = 10
"""Of each folder; a dataset made of links would otherwise fill the screen."""

OWN_DEPTH = 2
"""Levels of cache_dir and output_dir that are searched for links into a dataset: those that we name."""


@dataclass(frozen=True)
class Place:
    """A folder that the recipe names.

    Attributes:
        label: As messages call it: `cache_dir`, `dataset photos`.
        key: Of the recipe.
        written: As the recipe has it, joined to the project root.
        found: What it stands for.
    """

    label: str
    key: str
    written: Address
    found: Identified

    def shown(self) -> str:
        """`key: path`, and the real path where that is another."""
        real = "" if self.found.real == str(self.written) else f", which is {printable(self.found.real)}"
        return f"{self.key}: {printable(str(self.written))}{real}"


@dataclass(frozen=True)
class PathConflict:
    """Two places that are not apart.

    Attributes:
        first: The one that the sentence begins with.
        second: The other.
        relation: Of `first` to `second`: the same folder, inside it, containing it, or holding a link to it.
        lead: The link or mount point, for `link`.
    """

    first: Place
    second: Place
    relation: Relation
    lead: Lead | None = None

    def what(self) -> str:
        """One sentence."""
        if self.relation == "same":
            return f"{self.first.label} and {self.second.label} are the same folder"
        if self.relation == "link":
            return f"a link in {self.first.label} leads into {self.second.label}"
        verb = "lies inside" if self.relation == "inside" else "contains"
        return f"{self.first.label} {verb} {self.second.label}"

    def where(self) -> str:
        """Both places as written and as resolved, and the link."""
        lines = [self.first.shown(), self.second.shown()]
        if self.lead is not None:
            lines.append(f"link: {printable(self.lead.path)}, which is {printable(self.lead.target)}")
        return "\n".join(lines)

    def fix(self) -> str:
        """What to do about it."""
        if self.relation == "link":
            return f"remove the link, or move {self.second.label} to a folder that nothing leads to"
        return f"set {self.first.key} to a folder beside {self.second.label}, neither around it nor in it"


def check_isolation(recipe: Recipe) -> list[PathConflict]:
    """Every conflict among the recipe's datasets, cache_dir and output_dir; empty when they lie apart.

    Two datasets may contain one another. No folder needs to exist, and nothing is written. Links inside the
    datasets are looked at one by one, at most `MAX_LINKS_NAMED` conflicts of each dataset are listed.
    """
    cache = _place("cache_dir", "cache_dir", recipe.cache_dir)
    output = _place("output_dir", "output_dir", recipe.output_dir)
    datasets = [
        _place(f"dataset {dataset.name}", f"datasets[{index}].{dataset.root_key}", dataset.root)
        for index, dataset in enumerate(recipe.datasets)
    ]
    pairs = [(own, dataset) for own in (cache, output) for dataset in datasets] + [(cache, output)]
    conflicts = [conflict for pair in pairs if (conflict := _compare(*pair)) is not None]
    nested = {(conflict.first.key, conflict.second.key) for conflict in conflicts}
    for dataset in datasets:
        apart = [own for own in (cache, output) if (own.key, dataset.key) not in nested]
        conflicts += islice(_links(dataset, apart), MAX_LINKS_NAMED)
    return conflicts


def require_isolation(recipe: Recipe) -> None:
    """Nothing, when datasets, cache_dir and output_dir lie apart.

    Raises:
        PathIsolationError: Names both paths of each conflict, as written and as resolved.
    """
    conflicts = check_isolation(recipe)
    if not conflicts:
        return
    source = printable(str(recipe.source))
    where = "\n".join([source, *dict.fromkeys(line for c in conflicts for line in c.where().split("\n"))])
    fixes = dict.fromkeys(conflict.fix() for conflict in conflicts)
    what = "; ".join(dict.fromkeys(conflict.what() for conflict in conflicts))
    raise PathIsolationError(what, where=where, fix="\n".join(fixes))


def printable(path: str) -> str:
    """`path` as it is, or quoted with escapes where it holds what a terminal cannot show."""
    return path if path.isprintable() else repr(path)


def _place(label: str, key: str, path: Address) -> Place:
    return Place(label, key, path, identify(path))


def _compare(first: Place, second: Place) -> PathConflict | None:
    if first.found.same(second.found):
        return PathConflict(first, second, "same")
    if first.found.inside(second.found):
        return PathConflict(first, second, "inside")
    if second.found.inside(first.found):
        return PathConflict(first, second, "contains")
    return None


def _links(dataset: Place, apart: list[Place]) -> Iterator[PathConflict]:
    """Links between `dataset` and those of our own folders that lie `apart` from it, in both directions."""
    if not apart:
        return
    by_key = {own.key: own for own in apart}
    for lead in leads_out(dataset.found, {key: own.found for key, own in by_key.items()}):
        yield PathConflict(dataset, by_key[lead.place], "link", lead)
    for own in apart:
        for lead in leads_back(own.found, {dataset.key: dataset.found}, depth=OWN_DEPTH):
            yield PathConflict(own, dataset, "link", lead)
