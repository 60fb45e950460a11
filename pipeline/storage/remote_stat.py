"""The stat of a remote file, from the information that its file system gives."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

_UNSETTLED_NS = 2**62
"""Change time of a file with neither version nor time: always too recent to be trusted."""

_VERSION_KEYS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "content_md5", "md5", "Digest", "sha256", "sha", "blob_id"),
    *("CRC", "generation", "checksum"),
)
"""Keys under which file systems report a version of the content, in order of preference."""

_TIME_KEYS = ("mtime", "LastModified", "last_modified", "Last-Modified", "modified", "updated", "created")
"""Keys under which file systems report a modification time, in order of preference."""


def stat_from_info(info: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return (size in bytes, modification time, change time, version) of a remote file.

    Times are in nanoseconds. An unknown size is -1, an unknown time 0. The version is 0 if the file system
    reports none. A file with a version has change time 0, because the version reveals any change. A file with
    neither version nor time has a change time far in the future, so that it is read in each run.

    Args:
        info: Dictionary returned by `AbstractFileSystem.info` and `ls`.
    """
    size = -1 if info.get("size") is None else int(info["size"])
    times_ns = (_nanoseconds(info.get(name)) for name in _TIME_KEYS)
    time_ns = next((time for time in times_ns if time is not None), None)

    version = next((str(info[name]) for name in _VERSION_KEYS if info.get(name) not in (None, "")), None)
    if version is not None:
        return size, time_ns or 0, 0, text_number(version)
    return size, time_ns or 0, _UNSETTLED_NS if time_ns is None else time_ns, 0


def text_number(text: str) -> int:
    """Return a 63-bit hash of a text."""
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
        return round(value * 1e6) * 1000
    return None
