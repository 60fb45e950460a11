"""The funnel from what lies in the folders to what is kept: its numbers, and its lines for the log."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.images.formats import ImageError


@dataclass(frozen=True)
class Funnel:
    """What became of everything that was found; conserved: `found` = `kept` + the sum of `rejected`.

    Attributes:
        found: Number of what may be an image.
        passed_over: Number of other entries, by kind.
        rejected: Number of images by reason, of all stages so far.
        kept: Number of samples that go on.
    """

    found: int
    kept: int
    passed_over: Mapping[str, int] = field(default_factory=dict[str, int])
    rejected: Mapping[str, int] = field(default_factory=dict[str, int])

    def lines(self) -> list[str]:
        """The funnel as aligned lines of text, the widest part first."""
        rows = self.rows()
        width = max(len(f"{row['number']:,}") for row in rows)
        return [
            f"{row['number']:>{width},}  "
            + (f"  {row['kind'].replace('_', ' ')}" if row["kind"] else row["what"])
            for row in rows
        ]

    def rows(self) -> list[dict[str, Any]]:
        """The funnel as flat rows of `what`, `kind` (empty in the row of the total) and `number`."""
        rows = [{"what": "found", "kind": "", "number": self.found}]
        for what, counts in (("passed over", self.passed_over), ("rejected", self.rejected)):
            rows.append({"what": what, "kind": "", "number": sum(counts.values())})
            ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            rows += [{"what": what, "kind": kind, "number": number} for kind, number in ordered]
        return [*rows, {"what": "kept", "kind": "", "number": self.kept}]


def by_reason(reasons: Iterable[str]) -> dict[str, int]:
    """How often each reason was given, the most frequent first."""
    return dict(Counter(reasons).most_common())


def refusal(err: ImageError, stage: str, content_hash: str | None) -> dict[str, Any]:
    """The columns that a rejection adds to a sample's `sample_id`, `dataset` and `path`."""
    parts = {"reason": err.reason, "detail": printable(err.detail), "fix": printable(err.fix)}
    return {"stage": stage, **parts, "content_hash": content_hash}


def printable(text: str) -> str:
    """The text as valid Unicode: bytes of a file name that are no UTF-8 appear as escapes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return os.fsencode(text).decode("utf-8", "backslashreplace")
    return text
