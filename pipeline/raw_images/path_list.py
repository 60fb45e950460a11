"""Paths of a walk, as one piece of memory: as text objects they would take three times as much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl

_BYTES_OF_A_PART = 4_000_000
"""Of paths that are taken apart at a time."""


class Paths:
    """Paths in the order in which they came; none holds a NUL character, as no name does."""

    def __init__(self) -> None:
        """None yet."""
        self._text = bytearray()
        self._count = 0

    def append(self, path: str) -> None:
        """One more."""
        self._text += path.encode("utf-8", "surrogatepass")
        self._text.append(0)
        self._count += 1

    def extend(self, folder: str, names: Sequence[str]) -> None:
        """More, all in one folder.

        Args:
            folder: Empty, or ending with a slash.
            names: Of the files in it; may be none.
        """
        if names:
            self._text += (folder + f"\0{folder}".join(names)).encode("utf-8", "surrogatepass")
            self._text.append(0)
            self._count += len(names)

    def __len__(self) -> int:
        """How many there are."""
        return self._count

    def __iter__(self) -> Iterator[str]:
        """One by one."""
        for part in self._parts():
            yield from part.split("\0")

    @property
    def are_ascii(self) -> bool:
        """Whether all are: then each has one Unicode form, and is text."""
        return self._text.isascii()

    def series(self) -> pl.Series:
        """As a column.

        Raises:
            UnicodeEncodeError: A name is no text.
        """
        parts = [pl.Series([part], dtype=pl.String).str.split("\0").explode() for part in self._parts()]
        return pl.concat(parts) if parts else pl.Series(dtype=pl.String)

    def _parts(self) -> Iterator[str]:
        """The text, some of it at a time, without the NUL at its end."""
        start = 0
        while start < len(self._text):
            end = self._text.find(0, min(start + _BYTES_OF_A_PART, len(self._text) - 1))
            yield bytes(self._text[start:end]).decode("utf-8", "surrogatepass")
            start = end + 1
