"""Datasets, cache_dir and output_dir lie apart: checked before any work, by any spelling, without writing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Literal, NamedTuple

from pipeline.errors import PathIsolationError
from pipeline.storage.addresses import Address
from pipeline.storage.isolation.identity import Identified, identify
from pipeline.storage.isolation.links import Lead, leads_back, leads_out

Relation = Literal["same", "inside", "contains", "link"]

MAX_LINKS_NAMED = 10
"""Of each folder; a dataset made of links would otherwise fill the screen."""

OWN_DEPTH = 2
"""Levels of cache_dir and output_dir that are searched for links into a dataset: those that we name."""


class NamedPath(NamedTuple):
    """A path to check.

    Attributes:
        label: Name in messages: `cache_dir`, `dataset photos`.
        key: Recipe key that sets it.
        path: Local path or URL, need not exist.
    """

    label: str
    key: str
    path: Address


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


def check_isolation(inputs: Sequence[NamedPath], outputs: Sequence[NamedPath]) -> list[PathConflict]:
    """Return every conflict between an input and an output, and among outputs.

    Two inputs may contain one another. No folder needs to exist, and nothing is written. Inputs are searched
    for links that lead into an output, and the first `OWN_DEPTH` levels of outputs for links into an input.

    Args:
        inputs: Read-only folders.
        outputs: Folders that runs write to.

    Returns:
        Conflicts by path first, then links, at most `MAX_LINKS_NAMED` per input.
    """
    sources = [_place(*path) for path in inputs]
    targets = [_place(*path) for path in outputs]
    pairs = [*product(targets, sources), *combinations(targets, 2)]
    conflicts = [conflict for pair in pairs if (conflict := _compare(*pair)) is not None]

    # A link between nested folders would only repeat their conflict.
    nested = {(conflict.first.key, conflict.second.key) for conflict in conflicts}
    for source in sources:
        apart = [target for target in targets if (target.key, source.key) not in nested]
        conflicts += islice(_links(source, apart), MAX_LINKS_NAMED)
    return conflicts


def require_isolation(inputs: Sequence[NamedPath], outputs: Sequence[NamedPath], *, where: str) -> None:
    """Raise PathIsolationError unless `check_isolation` finds no conflict.

    Args:
        inputs: Read-only folders.
        outputs: Folders that runs write to.
        where: File that names the paths, such as the recipe.

    Raises:
        PathIsolationError: Names both paths of each conflict, as written and as resolved.
    """
    conflicts = check_isolation(inputs, outputs)
    if not conflicts:
        return

    # dict.fromkeys removes repetitions and keeps the order.
    what = "; ".join(dict.fromkeys(conflict.what() for conflict in conflicts))
    lines = dict.fromkeys(line for conflict in conflicts for line in conflict.where().split("\n"))
    fixes = dict.fromkeys(conflict.fix() for conflict in conflicts)
    raise PathIsolationError(what, where="\n".join([printable(where), *lines]), fix="\n".join(fixes))


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
