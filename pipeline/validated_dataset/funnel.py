"""Count what became of every file of the datasets, from the scan to the kept samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Funnel:
    """Numbers of files by outcome, with `found` = `kept` + the sum of `rejected`.

    Attributes:
        found: Number of files that may be images.
        kept: Number of kept samples.
        passed_over: Number of other files, by kind.
        rejected: Number of images rejected by the scan and the validation, by reason.
    """

    found: int
    kept: int
    passed_over: Mapping[str, int] = field(default_factory=dict[str, int])
    rejected: Mapping[str, int] = field(default_factory=dict[str, int])

    def lines(self) -> list[str]:
        """Return the funnel as aligned lines of text."""
        rows = self.rows()
        width = max(len(f"{row['number']:,}") for row in rows)
        return [
            f"{row['number']:>{width},}  "
            + (f"  {row['kind'].replace('_', ' ')}" if row["kind"] else row["what"])
            for row in rows
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Return rows of `what`, `kind` (empty for totals) and `number`, largest kinds first."""
        rows = [{"what": "found", "kind": "", "number": self.found}]
        for what, counts in (("passed over", self.passed_over), ("rejected", self.rejected)):
            rows.append({"what": what, "kind": "", "number": sum(counts.values())})
            ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            rows += [{"what": what, "kind": kind, "number": number} for kind, number in ordered]
        return [*rows, {"what": "kept", "kind": "", "number": self.kept}]
