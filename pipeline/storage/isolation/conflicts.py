"""Conflicts between datasets, cache_dir and output_dir, found before any work and without writing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Literal, NamedTuple

from pipeline.errors import PathIsolationError
from pipeline.escaping import printable_name, without_secrets
from pipeline.storage.addresses import Address
from pipeline.storage.isolation.identity import Identified, identify
from pipeline.storage.isolation.links import LinkInto, links_into, shallow_links_into

Relation = Literal["same", "inside", "contains", "link"]

# A dataset may consist of links.
MAX_LINKS_REPORTED = 10
"""Maximum number of links reported per input."""

OUTPUT_DEPTH = 2
"""Number of levels of cache_dir and output_dir that are searched for links into a dataset."""


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
class ResolvedPath:
    """A `NamedPath` with its real path and identities."""

    label: str
    key: str
    path: Address
    identified: Identified

    def text(self) -> str:
        """Return `key: path`, followed by the real path if it differs."""
        is_real = self.identified.real == str(self.path)
        real = "" if is_real else f" (real path {printable_name(without_secrets(self.identified.real))})"
        return f"{self.key}: {printable_name(without_secrets(str(self.path)))}{real}"


@dataclass(frozen=True)
class PathConflict:
    """Two paths that are not isolated from one another.

    Attributes:
        first: Subject of the message.
        second: Object of the message.
        relation: Relation of `first` to `second`: the same folder, inside it, containing it, or with a link
            into it.
        link: Link or mount point, for the relation "link".
        advice: Fix to show instead of the usual one of the relation.
    """

    first: ResolvedPath
    second: ResolvedPath
    relation: Relation
    link: LinkInto | None = None
    advice: str | None = None

    def what(self) -> str:
        """Return one sentence that names both folders."""
        if self.relation == "same":
            return f"{self.first.label} and {self.second.label} are the same folder"
        if self.relation == "link":
            return f"a link in {self.first.label} leads into {self.second.label}"
        verb = "is inside" if self.relation == "inside" else "contains"
        return f"{self.first.label} {verb} {self.second.label}"

    def where(self) -> str:
        """Return both paths as written and resolved, and the link."""
        lines = [self.first.text(), self.second.text()]
        if self.link is not None:
            lines.append(
                f"link: {printable_name(self.link.path)} (real path {printable_name(self.link.target)})"
            )
        return "\n".join(lines)

    def fix(self) -> str:
        """Return the instruction for the user."""
        if self.advice is not None:
            return self.advice
        if self.relation == "link":
            return f"remove the link, or move {self.second.label} to a folder that no link leads to"
        return f"set {self.first.key} to a folder that neither contains {self.second.label} nor is inside it"


def check_isolation(inputs: Sequence[NamedPath], outputs: Sequence[NamedPath]) -> list[PathConflict]:
    """Return every conflict between an input and an output, and among outputs; two inputs may overlap.

    No folder needs to exist, and nothing is written. Inputs are searched for links that lead into an output,
    and the first `OUTPUT_DEPTH` levels of outputs for links into inputs. Conflicts by path come first, then
    links, at most `MAX_LINKS_REPORTED` per input.
    """
    sources = [_resolve(*path) for path in inputs]
    targets = [_resolve(*path) for path in outputs]
    pairs = [*product(targets, sources), *combinations(targets, 2)]
    conflicts = [conflict for pair in pairs if (conflict := _compare(*pair)) is not None]

    # A link between nested folders would only repeat their conflict.
    nested = {(conflict.first.key, conflict.second.key) for conflict in conflicts}
    for source in sources:
        separate = [target for target in targets if (target.key, source.key) not in nested]
        conflicts += islice(_link_conflicts(source, separate), MAX_LINKS_REPORTED)
    return conflicts


def compare_paths(first: NamedPath, second: NamedPath) -> PathConflict | None:
    """Return the conflict of two paths that are the same or nested, or None; links below them are ignored."""
    return _compare(_resolve(*first), _resolve(*second))


def raise_conflicts(conflicts: Sequence[PathConflict], *, where: str) -> None:
    """Raise one PathIsolationError for all conflicts, if there are any.

    `where` is the file that names the paths, such as the recipe. The error names both paths of each conflict,
    as written and as resolved.
    """
    if not conflicts:
        return

    # dict.fromkeys removes repetitions and keeps the order.
    what = "; ".join(dict.fromkeys(conflict.what() for conflict in conflicts))
    lines = dict.fromkeys(line for conflict in conflicts for line in conflict.where().split("\n"))
    fixes = dict.fromkeys(conflict.fix() for conflict in conflicts)
    raise PathIsolationError(what, where="\n".join([printable_name(where), *lines]), fix="\n".join(fixes))


def _resolve(label: str, key: str, path: Address) -> ResolvedPath:
    return ResolvedPath(label, key, path, identify(path))


def _compare(first: ResolvedPath, second: ResolvedPath) -> PathConflict | None:
    if first.identified.same(second.identified):
        return PathConflict(first, second, "same")
    if first.identified.inside(second.identified):
        return PathConflict(first, second, "inside")
    if second.identified.inside(first.identified):
        return PathConflict(first, second, "contains")
    return None


def _link_conflicts(dataset: ResolvedPath, outputs: list[ResolvedPath]) -> Iterator[PathConflict]:
    """Yield links from `dataset` into separate outputs, and from these outputs into `dataset`."""
    if not outputs:
        return
    by_key = {output.key: output for output in outputs}
    identified = {key: output.identified for key, output in by_key.items()}
    for link in links_into(dataset.identified, identified):
        yield PathConflict(dataset, by_key[link.folder], "link", link)

    # Latentline itself creates the deeper levels of an output, and a cache has millions of files there.
    for output in outputs:
        for link in shallow_links_into(
            output.identified, {dataset.key: dataset.identified}, depth=OUTPUT_DEPTH
        ):
            yield PathConflict(output, dataset, "link", link)
