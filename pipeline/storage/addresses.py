"""Where data lies: a path of this machine, or an address that fsspec opens, such as `s3://bucket/photos`.

An address may be a chain, `zip://photos::s3://bucket/all.zip`: what is meant is in the first link, and what
it lies in follows. Nothing is opened here, and fsspec is not imported.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TypeAlias

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(://|::)")

_LOCAL = ("file", "local")


class Url(str):
    """An address of fsspec; the text is as it was written.

    `name`, `suffix` and `parent` are those of a path, of the first link that names a place: `s3://b/list.csv`
    of `simplecache::s3://b/list.csv`.
    """

    __slots__ = ()

    @property
    def links(self) -> tuple[str, ...]:
        """The chain: what is meant, what that lies in, and so on."""
        return tuple(self.split("::"))

    @property
    def protocol(self) -> str:
        """Of the first link."""
        return self.links[0].partition("://")[0]

    @property
    def name(self) -> str:
        """The last part of what is meant; empty for the top of an archive."""
        return PurePosixPath(self._place[2]).name

    @property
    def suffix(self) -> str:
        """With its dot; empty where there is none."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Url:
        """What holds it; the top of a server, bucket or archive holds itself."""
        number, protocol, place = self._place
        above = place.rstrip("/").rpartition("/")[0]
        links = self.links
        return Url("::".join([*links[:number], f"{protocol}://{above}", *links[number + 1 :]]))

    @property
    def _place(self) -> tuple[int, str, str]:
        """Of the first link that names a place: its number, its protocol and the place."""
        number = next((n for n, link in enumerate(self.links) if "://" in link), 0)
        protocol, _, place = self.links[number].partition("://")
        return number, protocol, place


Address: TypeAlias = Path | Url


def is_url(text: str) -> bool:
    """Whether the text is an address of fsspec and no path; `./` before it makes it a path."""
    return _URL.match(text) is not None


def address(text: str) -> Address:
    """What `str` of a path or an address was."""
    return Url(text) if is_url(text) else Path(text)


def absolute(text: str, root: Path) -> Address:
    """The place that a recipe's text stands for.

    `file://` and `local://` are paths, and so is what has no protocol, also as the last link of a chain:
    relative ones start at `root`, and `~` is the user's home.
    """
    if not is_url(text):
        return root / Path(text).expanduser()
    *inner, last = text.split("::")
    protocol, has_protocol, place = last.partition("://")
    if has_protocol and protocol.lower() not in _LOCAL:
        return Url(text)
    local = root / Path(place if has_protocol else last).expanduser()
    return Url("::".join([*inner, str(local)])) if inner else local


def anchor(url: Url) -> Address:
    """What the whole chain lies in: its last link, a path where that is one."""
    last = url.links[-1]
    return Url(last) if "://" in last else Path(last)


def place_parts(url: Url) -> tuple[str, ...]:
    """Of a single link, the names from the server or bucket on: ("bucket", "photos").

    Without user and password; the first one in lower case, as servers and buckets are.
    """
    names = [name for name in url.partition("://")[2].split("/") if name not in {"", "."}]
    if names:
        names[0] = names[0].rpartition("@")[2].lower()
    return tuple(names)
