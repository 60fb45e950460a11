"""The result of a job that `latentline run --json` reads."""

from __future__ import annotations

import json
from pathlib import Path

from assets.run import write_result
from pipeline.reporting.findings import Finding, write_findings
from pipeline.reporting.summary import CheckResult, RunResult


def result(output_dir: Path, *names: str) -> RunResult:
    checks = [CheckResult("raw_images", name, True, True, False, "") for name in names]
    return RunResult("flowers", output_dir, {}, checks)


def test_failed_checks_of_an_earlier_run_are_not_those_of_a_run_that_ended_before_its_first_asset(
    tmp_path: Path,
) -> None:
    failed = Finding("names_distinct", False, "error", "two images have one name", "rename one", [], {})
    write_findings(tmp_path, "raw_images", [failed])
    for names, found in (
        (("path_isolation",), {}),
        (("path_isolation", "names_distinct"), ["names_distinct"]),
    ):
        write_result(tmp_path / "result.json", [], [result(tmp_path, *names)])
        checks = json.loads((tmp_path / "result.json").read_text("utf-8"))["checks"]
        assert {asset: [each["name"] for each in rows] for asset, rows in checks.items()} == (
            {"raw_images": found} if found else {}
        )
