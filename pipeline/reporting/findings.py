"""Results of checks: outcomes, gates that a recipe allows, and reports for terminals and machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.errors import GateClosedError
from pipeline.escaping import finite_json
from pipeline.log import Log, discard
from pipeline.recipe.check_specs import ALL_SPECS, CheckSpec
from pipeline.reporting.reports import Report, read_report, report_path
from pipeline.storage.atomic import write_text

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.storage.tables import Tables

Severity = Literal["error", "warn"]

REJECTED_PAGE = Path("reports", "dataset", "rejected.html")
"""Page below output_dir with all rejected images, which validated_dataset writes."""

MAX_ROWS = 50
"""Maximum number of rows shown per finding; `numbers["num_rows"]` holds the total."""

MAX_NAMED_ROWS = 5
"""Maximum number of lines per gate, and of samples per line, in the error that the terminal shows."""


@dataclass(frozen=True)
class CheckContext:
    """Inputs of a check. A check reads its files itself, so that it can run alone.

    Attributes:
        reports: Reports by asset that take precedence over the report files.
        sources: False if the dataset files must not be read; checks that need them then pass.
    """

    recipe: Recipe
    tables: Tables
    reports: Mapping[str, Report] = field(default_factory=dict[str, Report])
    sources: bool = True
    log: Log = discard

    def report(self, asset: str) -> Report | None:
        """Return the asset's report of its last materialization, or None if it is missing or damaged."""
        return self.reports.get(asset) or read_report(self.recipe.output_dir, asset)


@dataclass(frozen=True)
class Outcome:
    """Result of one check, before `checks.allow` is applied.

    Attributes:
        summary: One sentence with the numbers that were measured.
        fix: Suggested fixes, most useful first; empty if passed.
        rows: Offending samples, buckets or files, one flat mapping each, worst first.
        numbers: Figures for machines and graphs.
        final: True if continuing can never make sense; `checks.allow` then does not apply.
    """

    passed: bool
    summary: str
    fix: str = ""
    rows: Sequence[Mapping[str, Any]] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    final: bool = False


@dataclass(frozen=True)
class Finding:
    """Result of one check, with `checks.allow` and `checks.gates` applied.

    Attributes:
        severity: Effect of a failure: "error" closes the gate, "warn" does not.
        rows: The first `MAX_ROWS` offending rows.
        numbers: JSON-serialisable figures for machines, including `num_rows`.
    """

    name: str
    passed: bool
    severity: Severity
    summary: str
    fix: str
    rows: list[dict[str, Any]]
    numbers: dict[str, Any]

    @property
    def closes(self) -> bool:
        """True if the finding closes a gate, which stops everything downstream."""
        return not self.passed and self.severity == "error"


def findings(context: CheckContext, asset: str, outcomes: Mapping[str, Outcome]) -> list[Finding]:
    """Return one finding per check of `asset`, in the order of `check_specs`.

    A failed gate that `checks.allow` names becomes a warning with a note in its summary, and a warning that
    `checks.gates` names becomes a gate. `<recipe>` in a fix is replaced by the recipe's name.
    """
    specs = ALL_SPECS[asset]
    undeclared = set(outcomes) ^ {spec.name for spec in specs}
    assert not undeclared, f"only in {asset}/checks.py or only in recipe/check_specs.py: {sorted(undeclared)}"
    checks = context.recipe.checks
    results = [
        _finding(
            spec, outcomes[spec.name], allowed=spec.name in checks.allow, stops=spec.name in checks.gates
        )
        for spec in specs
    ]
    return [replace(each, fix=each.fix.replace("<recipe>", context.recipe.name)) for each in results]


def _finding(spec: CheckSpec, outcome: Outcome, *, allowed: bool, stops: bool) -> Finding:
    summary, fix = outcome.summary, outcome.fix
    openable = spec.openable and not outcome.final
    allowed = allowed and openable

    if spec.gate and openable and not outcome.passed:
        if allowed:
            summary = f"{summary} (a warning only, because checks.allow names {spec.name})"
        else:
            fix = f"{fix}; or accept this knowingly with checks.allow: [{spec.name}]"

    stops = stops and not spec.gate
    if stops and not outcome.passed:
        fix = f"{fix}; or remove {spec.name} from checks.gates, which makes it a warning"

    return Finding(
        name=spec.name,
        passed=outcome.passed,
        severity="error" if stops or (spec.gate and not allowed) else "warn",
        summary=summary,
        fix=fix,
        rows=[dict(row) for row in outcome.rows[:MAX_ROWS]],
        numbers={"num_rows": len(outcome.rows), **outcome.numbers},
    )


def closed_gates_error(
    closed: Mapping[str, Sequence[Finding]], *, page: Path | None = None
) -> GateClosedError:
    """Return one error for all closed gates, given their findings by asset.

    `page` is a page that shows all rejected images; it is named if it exists.
    """
    assert any(closed.values()), "no gate is closed"
    all_findings = [finding for asset_findings in closed.values() for finding in asset_findings]

    # A path that several gates name is listed once: dictionaries keep the order and drop repetitions.
    where: dict[str, None] = {}
    for asset, asset_findings in closed.items():
        where[f"asset {asset}"] = None
        for finding in asset_findings:
            where |= dict.fromkeys(_row_lines(finding))
    if page is not None and page.is_file():
        where[f"with pictures: {page}"] = None

    # Several gates often have the same fix, such as to start the job again, or lines of it in common.
    gates_by_fix: dict[str, list[str]] = {}
    for finding in all_findings:
        if new_lines := _new_lines(finding.fix, gates_by_fix):
            gates_by_fix.setdefault(new_lines, []).append(finding.name)

    return GateClosedError(
        "\n".join(f"{finding.name}: {finding.summary}" for finding in all_findings),
        where="\n".join(where),
        fix="\n".join(f"{', '.join(names)}: {fix}" for fix, names in gates_by_fix.items()),
    )


def _new_lines(fix: str, known: Iterable[str]) -> str:
    """Return the lines of a fix that no other known fix has; the complete fix if it is known itself."""
    if fix in known:
        return fix
    known_lines = [line for each in known for line in each.splitlines()]
    return "\n".join(
        line
        for line in fix.splitlines()
        # The last line of a fix also names the gate that may be allowed.
        if not any(each == line or each.startswith(f"{line}; or accept") for each in known_lines)
    )


def _row_lines(finding: Finding) -> list[str]:
    # Samples with the same reason are one line, which several gates often have in common.
    groups: dict[object, list[dict[str, Any]]] = {}
    for place, row in enumerate(finding.rows):
        reason = _reason(row) if "sample_id" in row else ""
        groups.setdefault(reason or place, []).append(row)
    shown = list(groups.values())[:MAX_NAMED_ROWS]
    lines = [_group_line(rows) for rows in shown]
    more = int(finding.numbers.get("num_rows", len(finding.rows))) - sum(map(len, shown))
    return [*lines, f"and {more:,} more for {finding.name}"] if more > 0 else lines


def _reason(row: Mapping[str, Any]) -> str:
    return row.get("reason") or row.get("problem") or ""


def _group_line(rows: Sequence[Mapping[str, Any]]) -> str:
    if len(rows) == 1:
        # Without the fix of the row, which the finding's own fix repeats.
        values = (value for name, value in rows[0].items() if name != "fix" and value not in (None, ""))
        return ", ".join(map(str, values))
    names = ", ".join(str(row["sample_id"]) for row in rows[:MAX_NAMED_ROWS])
    more = len(rows) - MAX_NAMED_ROWS
    return f"{_reason(rows[0])}: {names}" + (f" and {more:,} more" if more > 0 else "")


def write_findings(output_dir: Path, asset: str, findings: Sequence[Finding]) -> Path:
    """Replace `output_dir/reports/<asset>_checks.json` atomically and return its path; keys are sorted.

    `checks` holds the fields of each finding in order, plus `gate` (the check is a gate) and `closed`.
    `gates_passed`, `gates_closed` and `warnings` count them. A failed gate that the recipe allows counts as a
    warning.
    """
    gates = {spec.name for spec in ALL_SPECS[asset] if spec.gate}
    gates |= {each.name for each in findings if each.severity == "error"}
    content = {
        "gates_passed": sum(each.passed for each in findings if each.name in gates),
        "gates_closed": sum(each.closes for each in findings),
        "warnings": sum(not each.passed and not each.closes for each in findings),
        "checks": [{**vars(each), "gate": each.name in gates, "closed": each.closes} for each in findings],
    }
    text = json.dumps(
        finite_json(content), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False, default=str
    )
    path = report_path(output_dir, f"{asset}_checks")
    write_text(path, text + "\n")
    return path


def read_failed_checks(output_dir: Path, asset: str) -> list[dict[str, Any]]:
    """Return the checks of an asset that failed, as `write_findings` has written them."""
    report = read_report(output_dir, f"{asset}_checks") or {}
    return [check for check in report.get("checks", []) if not check["passed"]]
