"""What fsspec tells of a place elsewhere: its file system, a file's stat, a package that is missing."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from pipeline.storage.addresses import Url

_NEVER_SETTLED_NS = 2**62
"""A change time that is always too recent to be trusted."""

_VERSIONS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "content_md5", "md5", "Digest", "sha256", "sha", "blob_id"),
    *("CRC", "generation", "checksum"),
)
"""What file systems call that which is another for another content; the first that there is counts."""

_TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "modified", "updated", "created")

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
"""Of the protocols whose code is in fsspec itself."""


_TOGETHER = frozenset(["memory", "zip", "file", "local", "dir"])
"""Protocols without requests whose files several threads may read at once; of others with requests all may,
and of the rest, such as a tar file's, one thread at a time."""


def open_url(url: Url) -> tuple[Any, str]:
    """The file system of an address, an `fsspec.AbstractFileSystem`, and the place within it.

    It is opened anew: an instance that fsspec keeps may know an older state.

    Raises:
        ImportError: A package is missing; see `missing_package`.
        Exception: Whatever the file system raises where the address leads nowhere.
    """
    from fsspec.core import url_to_fs

    opened: tuple[Any, str] = url_to_fs(url, skip_instance_cache=True)
    return opened


def missing_package(url: Url) -> str:
    """What to install for the link of an address whose package is missing."""
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
    return "the package that it names"


def one_at_a_time(files: Any) -> AbstractContextManager[Any]:
    """What a thread holds while it asks the file system: a lock, unless threads may ask together."""
    protocol: str | tuple[str, ...] = files.protocol
    names = {protocol} if isinstance(protocol, str) else set(protocol)
    return nullcontext() if names & _TOGETHER or files.async_impl else threading.Lock()


def stat_from_info(info: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Size in bytes, modification and change time in nanoseconds, and a number that stands for its version.

    Of what a file system says of one file. Size is -1 and times are 0 where they are not known. A file whose
    version is told needs no change time: it is 0. Of one without version and time it is far in the future,
    so that the file never counts as settled.

    Args:
        info: As `AbstractFileSystem.info` and `ls` have it.
    """
    size = info.get("size")
    version = next((str(info[name]) for name in _VERSIONS if info.get(name) not in (None, "")), None)
    times = (_nanoseconds(info.get(name)) for name in _TIMES)
    time_ns = next((time for time in times if time is not None), None)
    if version is not None:
        return (-1 if size is None else int(size), time_ns or 0, 0, number_of(version))
    changed_ns = _NEVER_SETTLED_NS if time_ns is None else time_ns
    return (-1 if size is None else int(size), time_ns or 0, changed_ns, 0)


def number_of(text: str) -> int:
    """63 bits that stand for a text."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big") >> 1


def _nanoseconds(value: object) -> int | None:
    """Since 1970, to the microsecond; None for what is no time."""
    if isinstance(value, str):
        try:
            value = parsedate_to_datetime(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        value = value.timestamp()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return round(value * 1e6) * 1000
    return None
