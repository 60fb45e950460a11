"""Deletion of many files of a cache at once."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from pipeline.cache.folder import CacheFolder
from pipeline.cache.users import access_fix
from pipeline.errors import StoreError

_AT_ONCE = 16
"""Number of requests that are sent at the same time."""


def delete_files(cache: CacheFolder, sizes: Mapping[str, int]) -> dict[str, int]:
    """Delete files from several threads.

    Args:
        cache: Files of the cache.
        sizes: Size of each file in bytes, by name.

    Returns:
        The files that still existed, with their sizes.

    Raises:
        StoreError: A file cannot be deleted. Others may have been deleted before.
    """

    def delete(name: str) -> bool:
        try:
            cache.delete(name)
        except FileNotFoundError:
            return False
        except OSError as err:
            raise StoreError(
                f"a file of the cache cannot be deleted: {err.strerror or err}",
                where=cache.where(name),
                fix=access_fix(cache.address, err),
            ) from err
        return True

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="latentline-gc") as pool:
        is_deleted = list(pool.map(delete, sizes))
    return {name: size for (name, size), deleted in zip(sizes.items(), is_deleted, strict=True) if deleted}
