"""The source of a dataset's address."""

from __future__ import annotations

from pipeline.storage.addresses import Address, Url
from pipeline.storage.local_source import LocalSource
from pipeline.storage.regular_files import MAX_FILE_BYTES
from pipeline.storage.remote_source import RemoteSource


def source_at(
    address: Address, *, max_file_bytes: int = MAX_FILE_BYTES, follow_links: bool = False
) -> LocalSource | RemoteSource:
    """Return the source of the files below a path or URL; a local path need not exist.

    With `follow_links`, the caption files of a local source may be links to files outside it.

    Raises:
        DatasetError: The URL cannot be opened.
    """
    if isinstance(address, Url):
        return RemoteSource(address, max_file_bytes=max_file_bytes)
    return LocalSource(address, max_file_bytes=max_file_bytes, follow_links=follow_links)
