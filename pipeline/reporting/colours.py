"""Colours of warnings and errors on a terminal."""

from __future__ import annotations

import os
import re
from typing import TextIO

_YELLOW, _RED, _RESET = "\x1b[33m", "\x1b[31m", "\x1b[0m"

_COLOURS = (
    # A warning may follow the name of an asset: "  raw_images   warning: ...".
    (re.compile(r"^( *|  \w+ +)(warning|WARNING)(?=:|  )", re.MULTILINE), rf"\1{_YELLOW}\2{_RESET}"),
    (re.compile(r"^(\w+Error|Stopped)(?=: )", re.MULTILINE), rf"{_RED}\1{_RESET}"),
    (re.compile(r"(?<=: )(failed)(?= after )"), rf"{_RED}\1{_RESET}"),
)


def has_colours(stream: TextIO) -> bool:
    """Return whether the stream is a terminal with colours; https://no-color.org turns them off."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def coloured(text: str, stream: TextIO) -> str:
    """Return printable text with coloured warnings and names of errors if `stream` has colours."""
    if has_colours(stream):
        for pattern, replacement in _COLOURS:
            text = pattern.sub(replacement, text)
    return text
