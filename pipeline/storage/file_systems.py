"""File systems that fsspec opens for remote addresses, and the stats of their files.

fsspec is imported when a file system is opened, so jobs without remote addresses never load it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from pipeline.storage.addresses import PROTOCOLS, Url, container
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

# A file that has just changed is not trusted, so each run reads it.
_UNSETTLED_NS = 2**62
"""Change time of a file with neither version nor time."""

_UNVERSIONED_ARCHIVES = frozenset(["tar", "libarchive"])
"""Archives that store no checksum of their members; zip has a CRC of each."""

_VERSION_KEYS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "content_md5", "md5", "Digest", "sha256", "sha", "blob_id"),
    *("CRC", "generation", "checksum"),
)
"""Keys under which file systems report a version of the content, in order of preference."""

_TIME_KEYS = ("mtime", "LastModified", "last_modified", "Last-Modified", "modified", "updated", "created")
"""Keys under which file systems report a modification time, in order of preference."""


def open_url(url: Url) -> tuple[Any, str]:
    """Return a new `fsspec.AbstractFileSystem` for an address, and the address's path within it.

    Raises:
        ImportError: A package is missing; see `missing_package`.
        Exception: Any error of the file system, for an address that cannot be opened.
    """
    from fsspec.core import url_to_fs

    protocols = _protocols_in(url)
    options = {name: {"get_client": bounded_client} for name in HTTP_PROTOCOLS if name in protocols}
    # A cached instance may hold an outdated listing.
    opened: tuple[Any, str] = url_to_fs(url, skip_instance_cache=True, **options)
    return opened


def require_listed_protocols(url: Url) -> None:
    """Raise ValueError for an address of a dataset with a protocol that is not in `PROTOCOLS`."""
    # A recipe's addresses were checked, but the jobs of a shared cache contain addresses too.
    if unlisted := _protocols_in(url) - PROTOCOLS:
        raise ValueError(f"the address must not use {', '.join(sorted(unlisted))}")


def _protocols_in(url: Url) -> set[str]:
    # The last link of a chain may be a local path.
    *inner, last = url.links
    links = [*inner, last] if "://" in last else inner
    return {link.partition("://")[0] for link in links}


def archive_version(url: Url) -> tuple[str, int] | None:
    """Return the version and change time of an archive whose members have none; None for any other address.

    A member that was replaced by one of equal size and time differs only in the archive around it. The time
    is in nanoseconds, as in `stat_from_info`.

    Raises:
        Exception: Any error of the file system, for an archive that cannot be opened.
    """
    if not _UNVERSIONED_ARCHIVES & {link.partition("://")[0] for link in url.links}:
        return None
    outermost = container(url)
    if not isinstance(outermost, Url):
        stat = outermost.stat()
        return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}", stat.st_ctime_ns
    files, path = open_url(outermost)
    size, time_ns, changed_ns, version = stat_from_info(files.info(path))
    return f"{size} {version or time_ns}", changed_ns


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
    # Others, such as SFTP and SMB, send one request per connection at a time.
    return nullcontext() if is_concurrent else threading.Lock()


def join_path(base: str, path: str) -> str:
    """Return `path` below `base`; one or both may be empty."""
    return f"{base}/{path}" if base and path else base or path


def protocols_of(files: Any) -> set[str]:
    """Return the protocols of a file system, such as s3 and s3a."""
    protocol: str | tuple[str, ...] = files.protocol
    return {protocol} if isinstance(protocol, str) else set(protocol)


def stat_from_info(info: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return (size in bytes, modification time, change time, version) from the info of `AbstractFileSystem`.

    Times are in nanoseconds. An unknown size is -1, an unknown time 0. The version is 0 if the file system
    reports none.
    """
    size = -1 if info.get("size") is None else int(info["size"])
    times_ns = (_nanoseconds(info.get(name)) for name in _TIME_KEYS)
    time_ns = next((time for time in times_ns if time is not None), None)

    version = next((str(info[name]) for name in _VERSION_KEYS if info.get(name) not in (None, "")), None)
    if version is not None:
        # The version reveals any change, so a time of change is not needed.
        return size, time_ns or 0, 0, text_number(version)
    return size, time_ns or 0, _UNSETTLED_NS if time_ns is None else time_ns, 0


def text_number(text: str) -> int:
    """Return a 63-bit hash of a text, which fits an int64 of the tables."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big") >> 1


def _nanoseconds(value: object) -> int | None:
    """Return nanoseconds since 1970, rounded to microseconds; None if `value` is not a time."""
    if isinstance(value, str):
        try:
            value = parsedate_to_datetime(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        value = value.timestamp()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # A float of seconds since 1970 has no digits beyond microseconds.
        return round(value * 1e6) * 1000
    return None
