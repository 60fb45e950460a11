"""Shared memory of this process, from Linux's /proc."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_NAME = "memfd:latentline"
_HEADER = re.compile(r"[0-9a-f]+-[0-9a-f]+ .* (\d+) +/memfd:latentline")


def shared_mappings() -> dict[str, dict[str, int]]:
    """Return the resident (Rss) and proportional (Pss) KiB of each shared file that is mapped, by inode."""
    mappings: dict[str, dict[str, int]] = {}
    inode: str | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            header = _HEADER.match(line)
            inode = header and header[1]
        elif inode is not None and (value := re.match(r"(Rss|Pss): +(\d+) kB", line)):
            sizes = mappings.setdefault(inode, {"Rss": 0, "Pss": 0})
            sizes[value[1]] += int(value[2])
    return mappings


def open_files() -> int:
    """Return the number of shared files that this process holds open besides its mappings."""
    number = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            number += _NAME in str(each.readlink())
    return number
