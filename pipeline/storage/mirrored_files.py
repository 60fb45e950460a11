"""The files that a mirror transfers: patterns of their names, and the order of the transfer.

A pattern is one of `fnmatch`, in which `*` also matches slashes. One that starts with `!` excludes names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

LAST = ("*/lora.json", "*/COMPLETE", "*/provenance.json", "*/finished.json")
"""Files that show that the files next to them are complete; they are transferred last, in this order."""

_WILDCARDS = re.compile(r"[*?\[]")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name matches a pattern, and none that excludes it."""
    excluded = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    if any(fnmatchcase(name, pattern) for pattern in excluded):
        return False
    return any(fnmatchcase(name, pattern) for pattern in patterns if not pattern.startswith("!"))


def folders_of(patterns: Sequence[str]) -> list[str]:
    """Return the folders, none inside another, in which all files are that match a pattern with wildcards."""
    starts = [(pattern, _WILDCARDS.search(pattern)) for pattern in patterns if not pattern.startswith("!")]
    folders = {pattern[: found.start()].rpartition("/")[0] for pattern, found in starts if found}
    return sorted(
        folder
        for folder in folders
        if not any(f"{folder}/".startswith(f"{other}/" if other else "") for other in folders - {folder})
    )


def is_mirrored(name: str) -> bool:
    """Return whether a name stays inside the folder and has no hidden part, such as temporary files."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and not any(part.startswith(".") for part in parts)


def rank_of(name: str) -> int:
    """Return 0 for ordinary files, and the position in `LAST`, from 1, for others."""
    return next((rank for rank, pattern in enumerate(LAST, 1) if fnmatchcase(name, pattern)), 0)


def in_order(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the names in groups that may be transferred at the same time."""
    by_rank: dict[int, list[str]] = {}
    for name in names:
        by_rank.setdefault(rank_of(name), []).append(name)
    for rank in sorted(by_rank):
        yield by_rank[rank]


def local_names(folder: Path, patterns: Sequence[str]) -> Iterator[str]:
    """Yield the names of the local files that match, from the folders in which they can be."""
    for start in folders_of(patterns):
        for parent, subfolders, names in os.walk(folder / start):
            subfolders.sort()
            top = Path(parent).relative_to(folder)
            for name in sorted(names):
                relative = (top / name).as_posix()
                if is_mirrored(relative) and matches(relative, patterns):
                    yield relative
    for name in patterns:
        if not _WILDCARDS.search(name) and matches(name, patterns) and (folder / name).is_file():
            yield name
