"""What checks found, as a file for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.checks.findings import Finding
from pipeline.recipe.gates import SPECS
from pipeline.reporting.reports import report_path
from pipeline.storage.atomic import write_text


def write_findings(output_dir: Path, asset: str, findings: Sequence[Finding]) -> Path:
    """Replace `output_dir/reports/<asset>_checks.json` atomically; keys are sorted.

    `checks` holds the fields of each finding, in order, whether it is a gate's, and whether that is closed.
    `gates_passed`, `gates_closed` and `warnings` count them. A gate that the recipe has opened and that
    fails is a warning.

    Args:
        output_dir: The recipe's.
        asset: Whose checks they are.
        findings: Of all its checks.

    Returns:
        The file's path.
    """
    gates = {spec.name for spec in SPECS[asset] if spec.gate}
    content = {
        "gates_passed": sum(each.passed for each in findings if each.name in gates),
        "gates_closed": sum(each.closes for each in findings),
        "warnings": sum(not each.passed and not each.closes for each in findings),
        "checks": [{**vars(each), "gate": each.name in gates, "closed": each.closes} for each in findings],
    }
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, default=str)
    path = report_path(output_dir, f"{asset}_checks")
    write_text(path, text + "\n")
    return path
