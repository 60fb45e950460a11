"""The complete stage: table, report, pictures of the report, and what a later evaluation reuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from PIL import Image

from pipeline.encoding.workers import EVALUATION_MODULE
from pipeline.evaluation import checks
from pipeline.evaluation.known_entries import FILE, read_known
from pipeline.evaluation.prepare import Request
from pipeline.evaluation.stage import evaluate
from pipeline.reporting.findings import CheckContext
from pipeline.reporting.reports import StageResult, write_report
from pipeline.storage.tables import SCHEMAS, Tables
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.evaluation.evaluated import SCORER, evaluated_recipe, pixels_of, prepared
from tests.pipeline.trained_lora.project import Project
from tests.pipeline.trained_lora.runs import run

if TYPE_CHECKING:
    from pipeline.recipe import Recipe


def evaluated(
    recipe: Recipe, log: list[str] | None = None, **request: Any
) -> tuple[StageResult, InProcessLaunch]:
    launch, tables = InProcessLaunch(), Tables(recipe.output_dir)
    lines = log if log is not None else []
    return evaluate(recipe, Request(**request), tables, launch=launch, log=lines.append), launch


def test_an_evaluation_writes_a_row_per_picture_and_number_and_a_report_with_intervals(
    trained: Project,
) -> None:
    recipe = evaluated_recipe(trained, pictures=2)
    result, launch = evaluated(recipe)
    assert launch.modules == [EVALUATION_MODULE, EVALUATION_MODULE]

    table = result.table
    assert dict(table.schema) == SCHEMAS["evaluation"]
    assert set(table["run"]) == {prepared(recipe).run}
    assert set(table["step"]) == {2, 4}
    counts = table.group_by("role", "number").len().sort("role", "number").rows()
    assert counts == [("base", "drift", 4), ("concept", "copies", 4), ("concept", "learned", 4)]
    assert set(table["picture"]) <= {path.stem for path in Path(str(recipe.cache_dir), "pictures").rglob("*")}

    report = json.loads(json.dumps(result.report))
    assert [step["step"] for step in report["steps"]] == [2, 4]
    for step in report["steps"]:
        assert step["learned"]["low"] <= step["learned"]["mean"] <= step["learned"]["high"]
        assert step["drift"]["mean"] > 0
        assert step["obeys"] is None
    assert "obeys" in report["absent"], "the scorer reads no texts"
    assert report["pictures"] == 2 * 2 * 3
    assert (report["pictures_encoded"], report["pictures_reused"]) == (12, 0)
    assert report["why"]

    folder = recipe.output_dir / "reports" / "evaluation"
    assert sorted(path.name for path in folder.iterdir()) == ["curves.png", "grid.jpg"]
    with Image.open(folder / "grid.jpg") as grid:
        assert grid.width > 2 * 256, "a column per prompt"


def test_R20_a_second_evaluation_launches_nothing_reads_no_entry_and_gives_the_same_report(
    trained: Project,
) -> None:
    recipe, log = evaluated_recipe(trained), list[str]()
    first, _ = evaluated(recipe)
    # Trusted by its stat, so what it holds is not read.
    second, launch = evaluated(recipe, log)
    assert launch.modules == []
    assert second.table.equals(first.table)
    volatile = {"seconds", "startup_seconds"} | {
        f"{name}_{kind}" for name in ("encoded", "reused") for kind in ()
    }
    same = {name for name in first.report if not name.endswith(("_encoded", "_reused"))} - volatile
    assert {name: first.report[name] for name in same} == {name: second.report[name] for name in same}

    known = read_known(recipe.output_dir)
    assert known.group_by("kind").len().sort("kind").rows() == [("features", 6 + 12), ("pictures", 6)]
    (recipe.output_dir / FILE).write_bytes(b"damaged")
    assert evaluated(recipe)[1].modules == [], "without the record, entries are read instead"


def test_one_more_scorer_draws_nothing_and_one_more_step_scores_only_that_step(trained: Project) -> None:
    recipe = evaluated_recipe(trained)
    evaluated(recipe, steps=(2,))
    result, _ = evaluated(recipe)
    assert (result.report["pictures_encoded"], result.report["features_encoded"]) == (2, 2)

    two = [SCORER, {"name": "tests.pipeline.evaluation.colour_scorer:GreyScorer"}]
    result, launch = evaluated(evaluated_recipe(trained, scorers=two))
    assert launch.modules == [EVALUATION_MODULE]
    assert (result.report["pictures_encoded"], result.report["features_reused"]) == (0, 18)
    assert set(result.report["by_scorer"]) == {SCORER, "tests.pipeline.evaluation.colour_scorer:GreyScorer"}


def test_steps_after_the_end_of_a_run_that_was_shortened_are_left_out(trained: Project) -> None:
    training = trained.recipe.training.model_copy(update={"steps": 2})
    shorter = Project(trained.recipe.model_copy(update={"training": training}), trained.latents, trained.text)
    assert prepared(evaluated_recipe(shorter)).steps == [2, 4]
    run(shorter, InProcessLaunch())
    assert [prepared(evaluated_recipe(shorter, steps=each)).steps for each in ("all", "last", [4])] == [
        [2],
        [2],
        [4],
    ]


def test_an_image_that_is_gone_is_left_out_with_a_warning(trained: Project) -> None:
    recipe, log = evaluated_recipe(trained), list[str]()
    (dataset,) = recipe.datasets
    gone = next(Path(str(dataset.path)).glob("64x64-*"))
    gone.unlink()
    result, _ = evaluated(recipe, log)
    assert any(f"1 image is missing from the comparison, such as photos/{gone.name}" in line for line in log)
    assert result.report["features_failed"] == 1


def test_without_a_holdout_the_report_says_what_is_not_measured(trained: Project) -> None:
    recipe = evaluated_recipe(trained)
    file = next(recipe.output_dir.glob("runs/*/inputs.parquet"))
    pl.read_parquet(file).with_columns(held_out=pl.lit(False)).write_parquet(file)
    result, _ = evaluated(recipe)
    assert set(result.report["absent"]) >= {"learned", "copies"}
    assert (result.report["chosen_step"], result.report["decided"]) == (None, False)
    write_report(recipe.output_dir, "evaluation", result.report)
    findings = {each.name: each for each in checks.run(CheckContext(recipe, Tables(recipe.output_dir)))}
    assert findings["concept_learned"].passed
    assert "not measured" in findings["concept_learned"].summary
    assert not findings["choice_decided"].passed


def test_R20_a_killed_evaluation_continues_with_the_pictures_that_it_lacks(
    trained: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.evaluation.worker import drawing

    recipe = evaluated_recipe(trained)
    drawn = 0
    original = drawing.Artist.draw

    def draw_two(self: Any, cell: Any) -> Any:
        nonlocal drawn
        if drawn == 2:
            raise KeyboardInterrupt
        drawn += 1
        return original(self, cell)

    monkeypatch.setattr(drawing.Artist, "draw", draw_two)
    with pytest.raises(KeyboardInterrupt):
        evaluated(recipe)
    monkeypatch.undo()
    interrupted = set(Path(str(recipe.cache_dir), "pictures").rglob("*.safetensors"))
    assert len(interrupted) == 2

    result, _ = evaluated(recipe)
    assert (result.report["pictures_encoded"], result.report["pictures_reused"]) == (4, 2)
    assert len(pixels_of(prepared(recipe))) == 6
