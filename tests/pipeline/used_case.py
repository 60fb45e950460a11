"""Recorded use of cache entries, and files of any age, for tests of `latentline gc`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pipeline.cache.used_keys import FOLDER, LIST_SUFFIX, KeyLists, UsedKeys
from pipeline.storage.addresses import Address

OLD_S = 1_000_000_000


def use(cache_dir: Address, keys: Iterable[str]) -> None:
    """Record keys as a job does."""
    KeyLists(cache_dir, [keys], log=print).mark()


def used(cache_dir: Address) -> set[str]:
    """Return the keys in all lists."""
    keys = UsedKeys(cache_dir, keep_s=1e9).read()
    return {keys[at : at + 1].tobytes().hex() for at in range(len(keys))}


def lists(root: Path) -> list[Path]:
    return sorted((root / FOLDER).glob(f"*{LIST_SUFFIX}"))


def make_old(root: Path, *, lists_too: bool = False) -> None:
    """Set the modification time of all files of a cache to 2001; of its lists only with `lists_too`."""
    for path in root.rglob("*"):
        if lists_too or path.suffix != LIST_SUFFIX:
            os.utime(path, (OLD_S, OLD_S))


def forget_use(root: Path) -> None:
    """Let all lists of a cache expire."""
    for path in lists(root):
        os.utime(path, (OLD_S, OLD_S))
