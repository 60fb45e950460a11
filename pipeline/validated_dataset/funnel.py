"""Count what became of every file of the datasets, from the scan to the kept samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def funnel_rows(
    kept: int, *, passed_over: Mapping[str, int], rejected: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return rows of `what`, `kind` (empty for totals) and `number`, largest kinds first.

    `found` is the number of files that may be images: the `kept` samples and those that the scan and the
    validation `rejected`, which are given by reason. Other files are ignored: `passed_over`, by kind.
    """
    rows = [{"what": "found", "kind": "", "number": kept + sum(rejected.values())}]
    for what, counts in (("ignored", passed_over), ("rejected", rejected)):
        rows.append({"what": what, "kind": "", "number": sum(counts.values())})
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        rows += [{"what": what, "kind": kind, "number": number} for kind, number in ordered]
    return [*rows, {"what": "kept", "kind": "", "number": kept}]


def funnel_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows on one line: "9 found, 3 ignored (3 hidden), 1 rejected (1 truncated), 8 kept"."""
    totals = [row for row in rows if not row["kind"]]
    return ", ".join(f"{row['number']:,} {row['what']}{_kinds_text(rows, row['what'])}" for row in totals)


def _kinds_text(rows: Sequence[Mapping[str, Any]], what: str) -> str:
    """Return the numbers of each kind in parentheses; an empty text without kinds."""
    kinds = [row for row in rows if row["what"] == what and row["kind"]]
    text = ", ".join(f"{row['number']:,} {row['kind'].replace('_', ' ')}" for row in kinds)
    return f" ({text})" if text else ""
