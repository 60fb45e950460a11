"""Addresses of data: a local path, or a URL that fsspec opens, such as `s3://bucket/photos`.

A URL may be a chain of links, such as `zip://photos::s3://bucket/all.zip`: the first link is the data, and
each following link is the container of the one before. This module opens nothing and imports no fsspec.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path, PurePosixPath
from typing import TypeAlias

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(://|::)")

PROTOCOLS = frozenset(
    [
        *("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "obs", "cos", "tos"),
        *("http", "https", "ftp", "sftp", "ssh", "smb", "webdav", "hdfs", "webhdfs", "dbfs"),
        *("hf", "github", "box", "dropbox", "gdrive"),
        *("zip", "tar", "libarchive", "simplecache", "file", "local", "memory"),
    ]
)
"""Protocols that addresses may use in each of their links.

fsspec knows more. With `reference`, a JSON file of the dataset names the files and addresses to read, and
may use variables of the environment. `dir`, `generic`, `git` and others open what another link does not
contain.
"""

_LOCAL_PROTOCOLS = ("file", "local")


class Url(str):
    """An fsspec URL with the text unchanged.

    `name`, `suffix` and `parent` work as for a path, on the first link that contains a path. For
    `simplecache::s3://b/list.csv`, that link is `s3://b/list.csv`.
    """

    __slots__ = ()

    @property
    def links(self) -> tuple[str, ...]:
        """Links of the chain, from the data to the outermost container."""
        return tuple(self.split("::"))

    @property
    def protocol(self) -> str:
        """Protocol of the first link, such as "zip" in `zip://photos::s3://bucket/data.zip`."""
        return self.links[0].partition("://")[0]

    @property
    def name(self) -> str:
        """Last part of the path; empty for the top of an archive."""
        return PurePosixPath(self._path_link[2]).name

    @property
    def suffix(self) -> str:
        """Suffix of the name with its dot; empty without one."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Url:
        """URL of the containing folder; the top of a server, bucket or archive is its own parent."""
        index, protocol, path = self._path_link
        parent = path.rstrip("/").rpartition("/")[0]
        links = self.links
        return Url("::".join([*links[:index], f"{protocol}://{parent}", *links[index + 1 :]]))

    @property
    def _path_link(self) -> tuple[int, str, str]:
        """Index, protocol and path of the first link that contains a path."""
        index = next((n for n, link in enumerate(self.links) if "://" in link), 0)
        protocol, _, path = self.links[index].partition("://")
        return index, protocol, path


Address: TypeAlias = Path | Url
"""A local path or an fsspec URL."""


def is_url(text: str) -> bool:
    """Return True if the text is a URL; a leading `./` makes it a path."""
    return _URL.match(text) is not None


def address(text: str) -> Address:
    """Return the address with the given `str`."""
    return Url(text) if is_url(text) else Path(text)


def expanded(text: str) -> Path:
    """Return a path with the home folder in place of `~` or `~user`; an unknown `~user` stays."""
    # For an unknown user, Path.expanduser raises; for a NUL, both functions do.
    return Path(text if "\0" in text else os.path.expanduser(text))  # noqa: PTH111


def absolute(text: str, root: Path) -> Address:
    """Return the address named in a recipe.

    `file://` and `local://` URLs become paths, and so does text without a protocol, including the last link
    of a chain. Relative paths start at `root`, and `~` is the home folder.
    """
    if not is_url(text):
        return root / expanded(text)

    *inner_links, last_link = text.split("::")
    protocol, separator, path = last_link.partition("://")
    if separator and protocol.lower() not in _LOCAL_PROTOCOLS:
        return Url(text)
    local = root / expanded(path if separator else last_link)
    return Url("::".join([*inner_links, str(local)])) if inner_links else local


def container(url: Url) -> Address:
    """Return the last link of a chain: `s3://bucket/data.zip` for `zip://photos::s3://bucket/data.zip`.

    It contains the files of all other links.
    """
    last_link = url.links[-1]
    return Url(last_link) if "://" in last_link else Path(last_link)


def url_parts(url: Url) -> tuple[str, ...]:
    """Return the names in a single link, starting with the server or bucket: ("bucket", "photos")."""
    names = [name for name in url.partition("://")[2].split("/") if name not in {"", "."}]
    if names:
        # User and password do not decide which files an address names, and neither does the case of a server.
        names[0] = names[0].rpartition("@")[2].lower()
    return tuple(names)


def address_hash(url: Url) -> str:
    """Return a hash of an address in hex; a slash at its end does not matter."""
    identity = "/".join([url.protocol.lower(), *url_parts(url)]) if len(url.links) == 1 else url
    return hashlib.sha256(identity.encode("utf-8")).hexdigest()
