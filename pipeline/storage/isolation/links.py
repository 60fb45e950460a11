"""Links and mount points inside a folder that lead into another folder."""

# ruff: noqa: PTH113, PTH115, PTH118, PTH120 - in a dataset made of links, text is four times as fast as Path

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from pipeline.storage.isolation.identity import Identified, identify, mount_table


@dataclass(frozen=True)
class LinkInto:
    """A link or mount point at `path` with the real path `target`, which is in the folder named `folder`."""

    path: str
    target: str
    folder: str


def links_into(searched: Identified, folders: Mapping[str, Identified]) -> Iterator[LinkInto]:
    """Yield the links and mount points at any depth of `searched` that reach one of `folders`, unordered.

    A link reaches a folder if its target is the folder, is inside it, or contains it. Folders that cannot be
    listed are skipped.
    """
    targets = Targets(folders)
    mounts = mount_table()
    # Each folder is visited once, so that loops of links end. Only links are resolved: other files cost
    # nothing beyond the scandir of their folder.
    pending, visited = [searched.real], {searched.real}
    while pending:
        for entry in _entries(pending.pop()):
            is_link = entry.is_symlink()
            if not is_link and not entry.is_dir(follow_symlinks=False):
                continue

            target, is_file = targets.resolve(entry.path) if is_link else (entry.path, False)
            if is_link or target in mounts:
                folder = targets.folder_reached(target, is_file)
                if folder is not None:
                    yield LinkInto(entry.path, target, folder)
                    continue
            if not is_file and target not in visited:
                visited.add(target)
                pending.append(target)


def shallow_links_into(
    searched: Identified, folders: Mapping[str, Identified], *, depth: int
) -> Iterator[LinkInto]:
    """Yield the links and mount points at most `depth` levels below `searched` that lead into `folders`."""
    mounts = mount_table()
    for entry in _entries(searched.real):
        target = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
        if target != entry.path or entry.path in mounts:
            identified = identify(target)
            # A write through such a link would end up in the other folder.
            for name, folder in folders.items():
                if identified.same(folder) or identified.inside(folder):
                    yield LinkInto(entry.path, target, name)
        elif depth > 1 and entry.is_dir(follow_symlinks=False):
            # Only the path of a searched folder matters.
            subfolder = Identified(entry.path, frozenset(), frozenset())
            yield from shallow_links_into(subfolder, folders, depth=depth - 1)


class Targets:
    """Targets of links. The parent folder that many targets share is resolved and identified once."""

    def __init__(self, folders: Mapping[str, Identified]) -> None:
        self._folders = folders
        self._real_parents: dict[str, str] = {}
        self._folder_of_parent: dict[str, str | None] = {}

    def resolve(self, link: str) -> tuple[str, bool]:
        """Return (real path of a link, True if it is a file); a dead link is resolved as far as possible."""
        with suppress(OSError):
            parent, name = os.path.split(os.path.join(os.path.dirname(link), os.readlink(link)))
            if name not in {"", ".", ".."}:
                if parent not in self._real_parents:
                    self._real_parents[parent] = os.path.realpath(parent)
                target = os.path.join(self._real_parents[parent], name)
                mode = os.lstat(target).st_mode
                if not stat.S_ISLNK(mode):
                    return target, stat.S_ISREG(mode)

        # A link to a link, a dead link, or a target that ends in `..`.
        target = os.path.realpath(link)
        return target, os.path.isfile(target)

    def folder_reached(self, target: str, is_file: bool) -> str | None:
        """Return the name of a folder that `target` is, is inside, or contains; None if there is none."""
        parent = os.path.dirname(target)
        if parent not in self._folder_of_parent:
            identified = identify(parent)
            names = (
                name
                for name, folder in self._folders.items()
                if identified.same(folder) or identified.inside(folder)
            )
            self._folder_of_parent[parent] = next(names, None)

        if self._folder_of_parent[parent] is not None or is_file:
            return self._folder_of_parent[parent]
        identified = identify(target)
        return next((name for name, folder in self._folders.items() if _overlap(identified, folder)), None)


def _overlap(one: Identified, other: Identified) -> bool:
    return one.same(other) or one.inside(other) or other.inside(one)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:
        yield from entries
