"""The error of closed gates: every one that is closed, the first things meant, and each one's fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.checks.findings import Finding
from pipeline.errors import GateClosedError

MAX_NAMED_ROWS = 5
"""Of a gate, in the text that the terminal shows; its check's metadata has more."""


def closed_gates_error(closed: Mapping[str, Sequence[Finding]]) -> GateClosedError:
    """What, where and fix of all `closed` gates, by the asset whose checks they are; at least one."""
    assert any(closed.values()), "no gate is closed"
    found = [finding for findings in closed.values() for finding in findings]
    where: dict[str, None] = {}
    for asset, findings in closed.items():
        where |= dict.fromkeys([f"asset {asset}", *(row for finding in findings for row in _named(finding))])
    fixes: dict[str, list[str]] = {}
    for finding in found:
        fixes.setdefault(finding.fix, []).append(finding.name)
    return GateClosedError(
        "\n".join(f"{finding.name}: {finding.summary}" for finding in found),
        where="\n".join(where),
        fix="\n".join(f"{', '.join(names)}: {fix}" for fix, names in fixes.items()),
    )


def _named(finding: Finding) -> list[str]:
    """A line for each of the first rows, without their fixes: those are in the finding's own."""
    rows = [_line(row) for row in finding.rows[:MAX_NAMED_ROWS]]
    more = int(finding.numbers.get("num_rows", len(rows))) - len(rows)
    return rows + ([f"and {more:,} more for {finding.name}"] if more > 0 else [])


def _line(row: Mapping[str, object]) -> str:
    return ", ".join(str(value) for name, value in row.items() if name != "fix" and value not in (None, ""))
