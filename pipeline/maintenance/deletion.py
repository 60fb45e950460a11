"""Deletion of many files of a cache at once."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pipeline.cache.backends import access_fix
from pipeline.cache.folder import CacheFolder
from pipeline.errors import StoreError

_AT_ONCE = 16
"""Number of requests that are sent at the same time."""

_FILES_AT_ONCE = 32


def delete_files(
    cache: CacheFolder, sizes: Mapping[str, int], *, until_s: float = math.inf
) -> dict[str, int]:
    """Delete files from several threads; `sizes` has the size of each file in bytes, by name.

    No more files are deleted after the time `until_s`, in seconds since 1970. Returns the deleted files and
    their sizes.

    Raises:
        StoreError: A file cannot be deleted. Others may have been deleted before.
    """

    def delete(names: Sequence[str]) -> list[str]:
        deleted: list[str] = []
        for name in names:
            if time.time() > until_s:
                break
            try:
                cache.delete(name)
            except FileNotFoundError:
                continue
            except OSError as err:
                raise StoreError(
                    f"a file of the cache cannot be deleted: {err.strerror or err}",
                    where=cache.where(name),
                    fix=access_fix(cache.address, err),
                ) from err
            deleted.append(name)
        return deleted

    names = list(sizes)
    # On a local disk, a task for each file would take longer than its deletion.
    length = max(1, min(_FILES_AT_ONCE, len(names) // _AT_ONCE))
    parts = [names[start : start + length] for start in range(0, len(names), length)]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="latentline-gc") as pool:
        deleted = [name for part in pool.map(delete, parts) for name in part]
    return {name: sizes[name] for name in deleted}
