"""State of a cache entry: its stat, and whether it is valid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

NO_STAT = (0, 0, 0, 0)
"""Row of `Store.stats` for a key without an entry."""


@dataclass(frozen=True)
class EntryStat:
    """Stat of an entry's file; while it is unchanged, the content is taken to be unchanged too.

    The stat of an entry in a pack is that of the pack's file, with the size of the entry.
    """

    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True)
class EntryState:
    """Result of `Store.check`.

    Attributes:
        status: "valid", "missing" or "wrong".
        reason: Defect of a wrong entry, without its path; empty otherwise.
        stat: Stat of the file; None if there is no regular file.
        metadata: Metadata of a valid entry that was read; None if its stat was trusted.
        shapes: Shapes of the tensors of such an entry, by name.
        place_in_pack: Location of an entry in a pack, for messages; empty for an entry with its own file.
    """

    status: Literal["valid", "missing", "wrong"]
    reason: str = ""
    stat: EntryStat | None = None
    metadata: dict[str, Any] | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None
    place_in_pack: str = ""

    @property
    def valid(self) -> bool:
        """Whether the entry can be used."""
        return self.status == "valid"
