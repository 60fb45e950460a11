"""`latentline evaluate`: the table of steps that it prints, and the options that it passes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli.main import latentline
from pipeline.evaluation import stage
from pipeline.reporting.reports import StageResult, read_report
from pipeline.storage.tables import Tables, empty

TEXT = """\
datasets: [{{name: photos, path: {folder}/photos}}]
output_dir: {folder}/out
cache_dir: {folder}/cache
model: {{base: {folder}/model}}
"""


def test_the_command_prints_the_steps_and_the_reason_and_writes_table_report_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "flowers.yaml").write_text(TEXT.format(folder=tmp_path), encoding="utf-8")
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(tmp_path / "configs"))
    interval = {"mean": 0.25, "low": 0.125, "high": 0.375, "pictures": 8}
    step = {"step": 1500, "strength": 1.0, "learned": interval, "obeys": None, "drift": None, "copies": None}
    report = {
        "steps": [step],
        "chosen_step": 1500,
        "decided": True,
        "why": "step 1500 is the best of 1",
        "absent": {"copies": "the holdout has a single image"},
        "limits": {"drift": 0.15, "copies": 0.1},
    }
    requests: list[Any] = []

    def evaluated(_recipe: object, request: object, *_: object, **__: object) -> StageResult:
        requests.append(request)
        return StageResult(empty("evaluation"), empty("rejected"), report)

    monkeypatch.setattr(stage, "evaluate", evaluated)
    shown = CliRunner().invoke(latentline, ["evaluate", "flowers", "--run", "abc", "--step", "500,1500"])
    assert shown.exception is None, shown.output
    assert [(request.run, request.steps) for request in requests] == [("abc", (500, 1500))]
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["step", "strength", "learned", "obeys", "drift", "copies"]
    assert lines[1].split() == ["1,500", "1", "0.250", "(0.125", "to", "0.375)", "-", "-", "-"]
    assert "copies is not measured: the holdout has a single image" in lines
    assert "step 1500 is the best of 1" in lines
    assert "latentline export flowers --best --run abc publishes it" in lines

    assert Tables(tmp_path / "out").read("evaluation").is_empty()
    written = read_report(tmp_path / "out", "evaluation")
    assert written is not None
    assert written["recipe"] == "flowers"
    checks = read_report(tmp_path / "out", "evaluation_checks")
    assert checks is not None
    assert checks["warnings"] == 0
