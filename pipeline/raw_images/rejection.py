"""Turn an `ImageError` into the columns of a rejected sample."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from pipeline.images.formats import ImageError


def rejection(err: ImageError, stage: str, content_hash: str | None) -> dict[str, Any]:
    """Return the columns that a rejection adds to a sample's `sample_id`, `dataset` and `path`."""
    return {
        "stage": stage,
        "reason": err.reason,
        "detail": printable(err.detail),
        "fix": printable(err.fix),
        "content_hash": content_hash,
    }


def count_by_reason(reasons: Iterable[str]) -> dict[str, int]:
    """Return the number of rejections for each reason, most frequent first."""
    return dict(Counter(reasons).most_common())


def printable(text: str) -> str:
    """Return the text as valid Unicode; the bytes of a file name that is not UTF-8 become escapes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return os.fsencode(text).decode("utf-8", "backslashreplace")
    return text
