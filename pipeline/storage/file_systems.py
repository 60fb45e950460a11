"""File systems that fsspec opens for remote addresses.

fsspec is imported when a file system is opened, so jobs without remote addresses never load it.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pipeline.storage.addresses import Url
from pipeline.storage.http_client import HTTP_PROTOCOLS, bounded_client

_CONCURRENT_PROTOCOLS = frozenset(["memory", "zip", "file", "local", "dir"])
"""Synchronous protocols that several threads may use at once."""

_PACKAGES = {
    "http": "aiohttp",
    "https": "aiohttp",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
    "github": "requests",
    "libarchive": "libarchive-c",
    "git": "pygit2",
}
"""Packages required by protocols that fsspec implements itself."""


def open_url(url: Url) -> tuple[Any, str]:
    """Return a new `fsspec.AbstractFileSystem` for an address, and the address's path within it.

    fsspec's instance cache is skipped, because a cached instance may hold an outdated listing. Web servers
    are read without following redirects to other servers.

    Raises:
        ImportError: A package is missing; see `missing_package`.
        Exception: Any error of the file system, for an address that cannot be opened.
    """
    from fsspec.core import url_to_fs

    # fsspec takes the options of each link of a chain under the name of the link's protocol.
    protocols = {link.partition("://")[0] for link in url.links}
    options = {name: {"get_client": bounded_client} for name in HTTP_PROTOCOLS if name in protocols}
    opened: tuple[Any, str] = url_to_fs(url, skip_instance_cache=True, **options)
    return opened


def missing_package(url: Url) -> str:
    """Return the name of the package to install for the first link that cannot be imported."""
    from fsspec.registry import get_filesystem_class, known_implementations

    for link in url.links:
        protocol = link.partition("://")[0]
        try:
            get_filesystem_class(protocol)
        except ImportError:
            package = str(known_implementations.get(protocol, {}).get("class", "")).partition(".")[0]
            return _PACKAGES.get(protocol, package)
        except ValueError:
            continue
    return "the package named in the message"


def request_lock(files: Any) -> AbstractContextManager[Any]:
    """Return a lock to hold during each request; a null context if threads may send requests at once."""
    is_concurrent = files.async_impl or protocols_of(files) & _CONCURRENT_PROTOCOLS
    return nullcontext() if is_concurrent else threading.Lock()


def join_path(base: str, path: str) -> str:
    """Return `path` below `base`; one or both may be empty."""
    return f"{base}/{path}" if base and path else base or path


def protocols_of(files: Any) -> set[str]:
    """Return the protocols of a file system, such as s3 and s3a."""
    protocol: str | tuple[str, ...] = files.protocol
    return {protocol} if isinstance(protocol, str) else set(protocol)
