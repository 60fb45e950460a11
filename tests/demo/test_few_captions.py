"""The studies with eight other captions; the complete one is `python -m demo.few_captions`."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.few_captions import RESULTS, report, trial
from demo.stored_results import read_results
from pipeline.recipe.project import project_root


def test_the_tables_of_the_page_have_the_stored_results() -> None:
    page = (project_root() / "docs" / "diagnosis.md").read_text("utf-8")
    results = read_results(RESULTS)
    assert len(results) == 10
    table, _, _ = "\n".join(report(results)).partition("\n\n")
    assert table in page
    assert sum(each["auc"] for each in results) / len(results) >= 0.98


@pytest.mark.slow
def test_a_gradient_finds_the_caption_that_fits_better(tmp_path: Path) -> None:
    result = trial(tmp_path, tmp_path / "cache", 0)
    assert result["auc"] >= 0.98
    assert result["epochs"] < 8
    assert result["found"] >= 3
    assert result["alarms"] == result["clean_alarms"] == 0
