"""Files of a dataset's folder that the recipe's patterns exclude, such as masks."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable

_WILDCARDS = {"*": "[^/]*", "?": "[^/]"}


def excluded_by(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that is True for paths below a dataset's folder that one of the patterns matches.

    A pattern without a slash matches the name of a file or folder at any depth, and one with a slash matches
    a path from the dataset's folder. A matched folder excludes everything below it. `*` matches any
    characters except a slash, and `?` matches one. Case counts, and the Unicode form does not.
    """
    alternatives = "|".join(_expression(unicodedata.normalize("NFC", pattern)) for pattern in patterns)
    if not alternatives:
        return lambda path: False
    match = re.compile(f"(?:{alternatives})(?:/|$)", re.DOTALL).match
    return lambda path: match(unicodedata.normalize("NFC", path)) is not None


def _expression(pattern: str) -> str:
    is_anchored = "/" in pattern.rstrip("/")
    body = "".join(_WILDCARDS.get(each) or re.escape(each) for each in pattern.strip("/"))
    return body if is_anchored else f"(?:.*/)?{body}"
