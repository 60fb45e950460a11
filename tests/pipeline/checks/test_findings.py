"""Findings, gates that a recipe opens, and the statistics of outliers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checks.findings import MAX_ROWS, CheckContext, Outcome, findings, outliers
from pipeline.recipe.gates import SPECS


def context(folder: Any) -> CheckContext:
    return CheckContext(folder.recipe, folder.tables)


def outcomes(**changed: Outcome) -> dict[str, Outcome]:
    return {spec.name: Outcome(True, "fine") for spec in SPECS["raw_images"]} | changed


def test_findings_come_in_the_order_of_the_names_whatever_the_order_given(folder: Any) -> None:
    found = findings(context(folder), "raw_images", dict(reversed(outcomes().items())))
    assert [finding.name for finding in found] == [spec.name for spec in SPECS["raw_images"]]
    assert not any(finding.closes for finding in found)


def test_O01_a_failed_gate_closes_and_a_failed_warning_does_not(folder: Any) -> None:
    failed = Outcome(False, "two are wrong", "mend them")
    found = findings(
        context(folder), "raw_images", outcomes(names_distinct=failed, file_size_outliers=failed)
    )
    by_name = {finding.name: finding for finding in found}
    gate, warning = by_name["names_distinct"], by_name["file_size_outliers"]
    assert (gate.severity, gate.closes) == ("error", True)
    assert "checks.allow: [names_distinct]" in gate.fix
    assert (warning.severity, warning.closes) == ("warn", False)
    assert "checks.allow" not in warning.fix


def test_a_gate_that_the_recipe_allows_warns_and_says_why(folder: Any) -> None:
    folder.checks = {"allow": ["names_distinct"]}
    failed = Outcome(False, "two are wrong", "mend them")
    found = findings(context(folder), "raw_images", outcomes(names_distinct=failed, conservation=failed))
    by_name = {finding.name: finding for finding in found}
    assert (by_name["names_distinct"].severity, by_name["names_distinct"].closes) == ("warn", False)
    assert "because checks.allow names names_distinct" in by_name["names_distinct"].summary
    assert by_name["conservation"].closes


def test_rows_are_cut_and_counted(folder: Any) -> None:
    rows = [{"sample_id": str(index)} for index in range(MAX_ROWS + 5)]
    found = findings(context(folder), "raw_images", outcomes(conservation=Outcome(False, "x", "y", rows)))
    finding = next(finding for finding in found if finding.name == "conservation")
    assert len(finding.rows) == MAX_ROWS
    assert finding.numbers["num_rows"] == MAX_ROWS + 5


def test_a_missing_or_damaged_report_is_none(folder: Any) -> None:
    assert context(folder).report("raw_images") is None
    folder.scan()
    report = context(folder).report("raw_images")
    assert report is not None
    assert report["samples"] == 0
    (folder.output_dir / "reports" / "raw_images.json").write_text("{")
    assert context(folder).report("raw_images") is None


def test_a_value_many_times_the_median_is_an_outlier_and_its_neighbours_are_not() -> None:
    values = np.random.default_rng(0).lognormal(0, 0.3, 1000)
    values[:3] = (100.0, 0.001, 30.0)
    found = outliers(values)
    assert np.flatnonzero(found.mask).tolist() == [0, 1, 2]
    assert found.judged
    assert found.low < found.median < found.high


def test_sound_log_normal_values_give_hardly_any_outlier() -> None:
    """A value is beyond 5 deviations with probability 5.7e-7; the seed is fixed."""
    assert outliers(np.random.default_rng(1).lognormal(5, 1, 100_000)).mask.sum() <= 2


def test_equal_values_allow_small_differences() -> None:
    assert outliers([100.0] * 20 + [110.0, 160.0]).mask.sum() == 0
    assert outliers([100.0] * 20 + [170.0]).mask.sum() == 1


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 6 + [1e9]])
def test_a_few_values_are_not_judged(values: list[float]) -> None:
    found = outliers(values)
    assert not found.judged
    assert not found.mask.any()


@given(st.lists(st.floats(1e-3, 1e6), min_size=8, max_size=50))
def test_the_order_does_not_matter_and_most_values_are_no_outliers(values: list[float]) -> None:
    found = outliers(values)
    assert found.mask.sum() * 2 <= len(values)
    assert outliers(values[::-1]).mask.tolist() == found.mask.tolist()[::-1]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_values_that_have_no_logarithm_are_errors(value: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        outliers([1.0] * 9 + [value])
