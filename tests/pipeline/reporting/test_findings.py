"""Findings: gates that a recipe allows, the error of closed gates, and the checks file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.log import discard
from pipeline.recipe.check_specs import SPECS
from pipeline.reporting.findings import (
    CheckContext,
    Finding,
    Outcome,
    Severity,
    closed_gates_error,
    findings,
    write_findings,
)


def context(folder: Any) -> CheckContext:
    return CheckContext(folder.recipe, folder.tables)


def outcomes(**changed: Outcome) -> dict[str, Outcome]:
    return {spec.name: Outcome(True, "fine") for spec in SPECS["raw_images"]} | changed


def test_findings_follow_the_order_of_the_specs(folder: Any) -> None:
    results = findings(context(folder), "raw_images", dict(reversed(outcomes().items())))
    assert [finding.name for finding in results] == [spec.name for spec in SPECS["raw_images"]]
    assert [finding.name for finding in results if finding.closes] == []
    assert {(finding.summary, finding.fix) for finding in results} == {("fine", "")}


def test_O01_a_failed_gate_closes_and_a_failed_warning_does_not(folder: Any) -> None:
    failed = Outcome(False, "two are wrong", "mend them")
    results = findings(
        context(folder), "raw_images", outcomes(names_distinct=failed, file_size_outliers=failed)
    )
    by_name = {finding.name: finding for finding in results}
    gate, warning = by_name["names_distinct"], by_name["file_size_outliers"]
    assert (gate.severity, gate.closes) == ("error", True)
    assert "checks.allow: [names_distinct]" in gate.fix
    assert (warning.severity, warning.closes) == ("warn", False)
    assert "checks.allow" not in warning.fix


def test_an_allowed_gate_warns_and_gives_the_reason(folder: Any) -> None:
    folder.checks = {"allow": ["names_distinct"]}
    failed = Outcome(False, "two are wrong", "mend them")
    results = findings(context(folder), "raw_images", outcomes(names_distinct=failed, conservation=failed))
    by_name = {finding.name: finding for finding in results}
    assert (by_name["names_distinct"].severity, by_name["names_distinct"].closes) == ("warn", False)
    assert "because checks.allow names names_distinct" in by_name["names_distinct"].summary
    assert by_name["conservation"].closes


def test_a_warning_that_the_recipe_makes_a_gate_closes_and_is_counted_as_one(folder: Any) -> None:
    folder.checks = {"gates": ["oddities", "file_size_outliers"]}
    failed = Outcome(False, "two are wrong", "mend them")
    results = findings(context(folder), "raw_images", outcomes(oddities=failed))
    by_name = {finding.name: finding for finding in results}
    assert by_name["oddities"].closes
    assert by_name["oddities"].fix.endswith(
        "; or remove oddities from checks.gates, which makes it a warning"
    )
    assert (by_name["file_size_outliers"].severity, by_name["file_size_outliers"].closes) == ("error", False)
    report = json.loads(write_findings(folder.output_dir, "raw_images", results).read_text("utf-8"))
    num_gates = sum(spec.gate for spec in SPECS["raw_images"]) + 2
    assert (report["gates_passed"], report["gates_closed"], report["warnings"]) == (num_gates - 1, 1, 0)


def test_a_final_failure_and_a_check_of_files_cannot_be_allowed(folder: Any) -> None:
    folder.checks = {"allow": ["names_distinct", "shape_uniformity"]}
    final = Outcome(False, "nothing is left", "add some", final=True)
    results = findings(context(folder), "raw_images", outcomes(names_distinct=final))
    (finding,) = (each for each in results if not each.passed)
    assert (finding.closes, finding.summary, finding.fix) == (True, "nothing is left", "add some")

    strict = {spec.name: Outcome(False, "damaged", "mend it") for spec in SPECS["text_embeddings"]}
    for finding in findings(context(folder), "text_embeddings", strict):
        assert (finding.summary, finding.fix) == ("damaged", "mend it"), finding.name
        warnings = ("captions_fit", "trigger_fits", "previews_name_trigger")
        assert finding.closes == (finding.name not in warnings), finding.name


def test_a_fix_names_the_recipe(folder: Any) -> None:
    failed = Outcome(False, "two are wrong", "run <recipe>, or look at <recipe>.yaml")
    results = findings(context(folder), "raw_images", outcomes(oddities=failed))
    assert results[-1].fix == "run small, or look at small.yaml"


def test_a_check_reads_the_sources_and_logs_nothing_unless_stated(folder: Any) -> None:
    stated = CheckContext(folder.recipe, folder.tables, {}, sources=True, log=discard)
    default = context(folder)
    assert (default.reports, default.sources, default.log) == (stated.reports, stated.sources, stated.log)


def test_fifty_rows_are_shown_and_all_are_counted(folder: Any) -> None:
    rows = [{"sample_id": str(index)} for index in range(55)]
    results = findings(context(folder), "raw_images", outcomes(conservation=Outcome(False, "x", "y", rows)))
    finding = next(finding for finding in results if finding.name == "conservation")
    assert finding.rows == rows[:50]
    assert finding.numbers["num_rows"] == 55


def test_a_missing_or_damaged_report_is_none(folder: Any) -> None:
    assert context(folder).report("raw_images") is None
    folder.scan()
    report = context(folder).report("raw_images")
    assert report is not None
    assert report["samples"] == 0
    (folder.output_dir / "reports" / "raw_images.json").write_text("{")
    assert context(folder).report("raw_images") is None


def closed_gate(name: str, fix: str, rows: list[dict[str, object]], num_rows: int) -> Finding:
    numbers = {"num_rows": num_rows}
    return Finding(name, False, "error", f"{num_rows} problems", fix, rows, numbers)


def test_the_error_names_every_closed_gate_with_its_first_rows_and_groups_equal_fixes() -> None:
    rows: list[dict[str, object]] = [
        {"sample_id": f"photos/{i}.png", "bytes": None, "fix": "x"} for i in range(7)
    ]
    error = closed_gates_error(
        {
            "small/vae_latents": [
                closed_gate("completeness", "run it", rows, 1234),
                closed_gate("other", "run it", [], 1),
            ],
            "small/text_embeddings": [closed_gate("captions", "write one", [], 0)],
        }
    )
    assert error.what.splitlines() == [
        "completeness: 1234 problems",
        "other: 1 problems",
        "captions: 0 problems",
    ]
    assert error.where.splitlines() == [
        "asset small/vae_latents",
        *(f"photos/{i}.png" for i in range(5)),
        "and 1,229 more for completeness",
        "and 1 more for other",
        "asset small/text_embeddings",
    ]
    assert error.fix.splitlines() == ["completeness, other: run it", "captions: write one"]


def test_O02_a_fix_that_several_gates_share_and_the_page_of_the_images_are_named_once(tmp_path: Path) -> None:
    shared = "1 caption missing, the first is a.png: write a.txt"
    gates = [
        closed_gate("captions_present", f"{shared}; or accept this knowingly with allow", [], 0),
        closed_gate("rejected_fraction", f"{shared}\nor raise the limit; or accept this knowingly", [], 0),
    ]
    page = tmp_path / "rejected.html"
    assert "pictures" not in closed_gates_error({"small/validated_dataset": gates}, page=page).where
    page.touch()
    error = closed_gates_error({"small/validated_dataset": gates}, page=page)
    assert error.where.splitlines() == ["asset small/validated_dataset", f"with pictures: {page}"]
    assert error.fix.splitlines() == [
        f"captions_present: {shared}; or accept this knowingly with allow",
        "rejected_fraction: or raise the limit; or accept this knowingly",
    ]


def test_O02_samples_with_the_same_reason_are_one_line_which_gates_share() -> None:
    missing: list[dict[str, object]] = [
        {"sample_id": f"d/{i}.png", "reason": "caption_missing", "detail": f"there is no {i}.txt"}
        for i in range(7)
    ]
    broken: dict[str, object] = {"sample_id": "d/x.png", "reason": "undecodable", "detail": "no PNG"}
    gates = [
        closed_gate("captions_present", "write them", missing, 7),
        closed_gate("rejected_fraction", "raise it", [*missing, broken], 60),
    ]
    assert closed_gates_error({"small/validated_dataset": gates}).where.splitlines() == [
        "asset small/validated_dataset",
        "caption_missing: d/0.png, d/1.png, d/2.png, d/3.png, d/4.png and 2 more",
        "d/x.png, undecodable, no PNG",
        "and 52 more for rejected_fraction",
    ]


def result(name: str, *, passed: bool, severity: Severity = "error") -> Finding:
    return Finding(
        name, passed, severity, "3 of 4", "do it again", [{"path": Path("a.png")}], {"num_rows": 1}
    )


def test_the_checks_file_holds_every_finding_and_counts_gates_and_warnings(tmp_path: Path) -> None:
    names = [spec.name for spec in SPECS["raw_images"]]
    gates = [spec.name for spec in SPECS["raw_images"] if spec.gate]
    closed, allowed, *passing = gates
    results = [
        result(closed, passed=False),
        result(allowed, passed=False, severity="warn"),
        *(result(name, passed=True) for name in passing),
        *(result(name, passed=False, severity="warn") for name in names if name not in gates),
    ]
    path = write_findings(tmp_path, "raw_images", results)
    assert path == tmp_path / "reports" / "raw_images_checks.json"
    content = json.loads(path.read_text("utf-8"))
    assert (content["gates_passed"], content["gates_closed"]) == (len(passing), 1)
    assert content["warnings"] == 1 + len(names) - len(gates)
    assert [each["name"] for each in content["checks"]] == [each.name for each in results]
    assert content["checks"][0] == {
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
    assert (content["checks"][1]["gate"], content["checks"][1]["closed"]) == (True, False)


def test_the_checks_file_is_readable_text_with_sorted_keys(tmp_path: Path) -> None:
    """Files of two runs are compared line by line, so their layout is part of the interface."""
    path = write_findings(tmp_path, "vae_latents", [result("completeness – größer", passed=True)])
    text = path.read_text("utf-8")
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert "größer" in text


def test_the_checks_file_is_replaced_by_the_next_run(tmp_path: Path) -> None:
    for passed in (False, True):
        path = write_findings(tmp_path, "vae_latents", [result("completeness", passed=passed)])
    assert json.loads(path.read_text("utf-8"))["gates_closed"] == 0
    assert [each.name for each in path.parent.iterdir()] == [path.name]
