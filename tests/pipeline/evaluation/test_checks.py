"""The checks of evaluation, from reports: passed, failed, and not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluation import checks
from pipeline.reporting.findings import CheckContext, Finding
from pipeline.storage.tables import Tables
from tests.small_recipe import small_recipe


def number(mean: float, low: float | None, high: float | None) -> dict[str, Any]:
    return {"mean": mean, "low": low, "high": high}


def step(number_of_step: int, **numbers: Any) -> dict[str, Any]:
    usual = {"learned": number(0.3, 0.2, 0.4), "obeys": None, "drift": number(0.1, 0.05, 0.2), "copies": None}
    return {"step": number_of_step, "strength": 1.0, **usual, **numbers}


def findings_of(tmp_path: Path, steps: list[dict[str, Any]], **report: Any) -> dict[str, Finding]:
    usual = {
        "steps": steps,
        "chosen_step": steps[-1]["step"],
        "decided": True,
        "why": "step 4 is the best",
        "absent": {"obeys": "no scorer reads texts", "copies": "the holdout is empty"},
        "limits": {"drift": 0.15, "copies": 0.1},
    }
    recipe = small_recipe(tmp_path)
    context = CheckContext(recipe, Tables(recipe.output_dir), {"evaluation": {**usual, **report}})
    return {each.name: each for each in checks.run(context)}


def test_all_pass_for_a_good_step_and_a_number_that_is_absent_says_why(tmp_path: Path) -> None:
    findings = findings_of(tmp_path, [step(2), step(4)])
    assert all(each.passed for each in findings.values())
    assert (
        "step 4 is closer to held-out images than the base model by 0.300"
        in findings["concept_learned"].summary
    )
    assert findings["not_memorised"].summary == "not measured: the holdout is empty"
    assert {each.severity for each in findings.values()} == {"warn"}


@pytest.mark.parametrize(
    ("values", "failed", "text"),
    [
        ({"learned": number(0.1, -0.1, 0.3)}, "concept_learned", "which may be chance"),
        ({"learned": number(0.1, None, None)}, "concept_learned", "a single picture"),
        (
            {"drift": number(0.2, 0.1, 0.3)},
            "base_kept",
            "drift of step 4 is 0.200 (0.100 to 0.300), and its limit is 0.15",
        ),
        ({"copies": number(0.2, 0.11, 0.3)}, "not_memorised", "its limit is 0.1"),
        ({"copies": number(0.11, None, None)}, "not_memorised", "a single picture"),
    ],
)
def test_R19_a_step_that_is_not_good_fails_one_check(
    tmp_path: Path, values: dict[str, Any], failed: str, text: str
) -> None:
    findings = findings_of(tmp_path, [step(2), step(4, **values)])
    assert [name for name, each in findings.items() if not each.passed] == [failed]
    assert text in findings[failed].summary
    assert findings[failed].fix


def test_copies_whose_interval_contains_the_limit_are_not_flagged_and_the_check_asks_for_more_pictures(
    tmp_path: Path,
) -> None:
    """A healthy LoRA had these numbers with 24 pictures."""
    finding = findings_of(tmp_path, [step(4, copies=number(0.111, -0.097, 0.320))])["not_memorised"]
    assert finding.passed
    assert "cannot tell whether it is above, raise evaluation.pictures" in finding.summary


def test_the_checks_are_about_the_chosen_step_or_else_the_last_one(tmp_path: Path) -> None:
    steps = [step(2), step(4, drift=number(0.5, 0.4, 0.6))]
    assert findings_of(tmp_path, steps, chosen_step=2)["base_kept"].passed
    undecided = findings_of(tmp_path, steps, chosen_step=None, decided=False, why="not decided: few pictures")
    assert not undecided["base_kept"].passed
    assert "not decided: few pictures (2 steps)" in undecided["choice_decided"].summary


def test_a_missing_report_fails_all_checks(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    findings = checks.run(CheckContext(recipe, Tables(recipe.output_dir)))
    assert not any(each.passed for each in findings)
    assert "latentline evaluate flowers" in findings[0].fix
