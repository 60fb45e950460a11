"""Choice of a cache's backend by its address.

Another backend is a class that implements `CacheFolder`, a line here, and a type of address in
`pipeline.storage.addresses`.
"""

from __future__ import annotations

from pipeline.cache.folder import CacheFolder
from pipeline.cache.fsspec_folder import FsspecFolder
from pipeline.cache.local_folder import LocalFolder
from pipeline.storage.addresses import Address, Url


def cache_folder(address: Address) -> CacheFolder:
    """Return the files at a recipe's `cache_dir`; nothing is read yet.

    Raises:
        StoreError: A package is missing, or the address cannot be opened.
    """
    return FsspecFolder(address) if isinstance(address, Url) else LocalFolder(address)
