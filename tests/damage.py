"""Damage to a file, as disks, crashes and people cause it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def flip(path: Path) -> None:
    """Change one bit in the middle of the file."""
    data = bytearray(path.read_bytes() or b"\0")
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Cut the file off after its first half."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def empty(path: Path) -> None:
    """Leave no bytes."""
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    """Replace the file by one of another program."""
    path.write_bytes(b"This is the file of another program.\n" * 20)


DAMAGES: dict[str, Callable[[Path], None]] = {each.__name__: each for each in (flip, cut, empty, foreign)}
