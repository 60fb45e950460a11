"""Text for terminals and logs: control characters and invisible letters become escapes."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

_JOINERS = frozenset("\u200c\u200d")
"""Invisible characters that Persian and Indic texts and composed emoji need."""


def printable(text: str) -> str:
    """Return `text` on one line, with control characters and lone surrogates as backslash escapes."""
    return _escaped(" ".join(text.split()))


def printable_name(text: str) -> str:
    """Return a file name or path on one line, with line breaks and other control characters as escapes."""
    return _escaped(text)


def printable_lines(text: str) -> str:
    """Return `text` with its line breaks and tabs, and other control characters as backslash escapes."""
    if text.isprintable():
        return text
    return "".join(letter if letter in "\n\t" else _escaped(letter) for letter in text)


def json_text(value: Any) -> str:
    """Return a JSON-serializable value as indented JSON that is safe to print."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return "".join(
        letter if letter == "\n" or not _is_invisible(letter) else json.dumps(letter)[1:-1] for letter in text
    )


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(_escape(letter) if _is_invisible(letter) else letter for letter in text)


def _is_invisible(letter: str) -> bool:
    return not letter.isprintable() and letter not in _JOINERS and unicodedata.category(letter) != "Zs"


def _escape(letter: str) -> str:
    # Python decodes the bytes of a file name that is not UTF-8 as these surrogates.
    if "\udc80" <= letter <= "\udcff":
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode("ascii")
