"""What machines read of a run's checks."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.checks.findings import Finding, Severity
from pipeline.checks.record import write_findings
from pipeline.recipe.gates import SPECS


def found(name: str, *, passed: bool, severity: Severity = "error") -> Finding:
    return Finding(
        name, passed, severity, "3 of 4", "do it again", [{"path": Path("a.png")}], {"num_rows": 1}
    )


def test_each_check_stands_there_with_what_it_found_and_whether_its_gate_is_closed(tmp_path: Path) -> None:
    names = [spec.name for spec in SPECS["raw_images"]]
    gates = [spec.name for spec in SPECS["raw_images"] if spec.gate]
    closed, opened, *passing = gates
    findings = [
        found(closed, passed=False),
        found(opened, passed=False, severity="warn"),
        *(found(name, passed=True) for name in passing),
        *(found(name, passed=False, severity="warn") for name in names if name not in gates),
    ]
    path = write_findings(tmp_path, "raw_images", findings)
    assert path == tmp_path / "reports" / "raw_images_checks.json"
    said = json.loads(path.read_text("utf-8"))
    assert (said["gates_passed"], said["gates_closed"]) == (len(passing), 1)
    assert said["warnings"] == 1 + len(names) - len(gates)
    assert [each["name"] for each in said["checks"]] == [each.name for each in findings]
    assert said["checks"][0] == {
        "name": closed,
        "gate": True,
        "closed": True,
        "passed": False,
        "severity": "error",
        "summary": "3 of 4",
        "fix": "do it again",
        "rows": [{"path": "a.png"}],
        "numbers": {"num_rows": 1},
    }
    assert (said["checks"][1]["gate"], said["checks"][1]["closed"]) == (True, False)


def test_the_files_of_the_last_checks_are_replaced(tmp_path: Path) -> None:
    for passed in (False, True):
        path = write_findings(tmp_path, "vae_latents", [found("completeness", passed=passed)])
    assert json.loads(path.read_text("utf-8"))["gates_closed"] == 0
    assert [each.name for each in path.parent.iterdir()] == [path.name]
