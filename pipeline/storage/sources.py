"""Open the source that an address names: a local folder, or whatever fsspec reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.storage.addresses import Address, Url
from pipeline.storage.source import LocalSource

if TYPE_CHECKING:
    from pipeline.storage.remote_source import RemoteSource


def source_at(address: Address) -> LocalSource | RemoteSource:
    """Return the source of the files below a path or URL; a local path need not exist.

    Raises:
        DatasetError: The URL cannot be opened.
    """
    if not isinstance(address, Url):
        return LocalSource(address)

    # fsspec is imported only for remote datasets.
    from pipeline.storage.remote_source import RemoteSource

    return RemoteSource(address)
