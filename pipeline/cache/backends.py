"""Choice of a cache's backend by its address.

`FsspecFolder` serves every protocol that fsspec knows. Another backend is a class that implements
`CacheFolder`, and its protocol here and in `pipeline.storage.addresses.PROTOCOLS`.
"""

from __future__ import annotations

from pipeline.cache.folder import CacheFolder
from pipeline.cache.fsspec_folder import FsspecFolder
from pipeline.cache.local_folder import LocalFolder
from pipeline.storage.addresses import Address, Url
from pipeline.storage.os_errors import as_file_access_error
from pipeline.storage.remote_folder import ACCESS_FIX


def cache_folder(address: Address) -> CacheFolder:
    """Return the files at a recipe's `cache_dir`; nothing is read yet.

    Raises:
        StoreError: A package is missing, or the address cannot be opened.
    """
    return FsspecFolder(address) if isinstance(address, Url) else LocalFolder(address)


def access_fix(cache_dir: Address, err: OSError) -> str:
    """Return the fix for an error of reading, writing or deleting a file of the cache."""
    if isinstance(cache_dir, Url):
        return ACCESS_FIX
    cause = as_file_access_error(err)
    return cause.fix if cause else "make sure that cache_dir is on a working disk"
