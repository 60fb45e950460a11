"""A job decides between two steps of a real training by its pictures, and publishes the chosen one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from assets.definitions import build_definitions
from assets.names import LAUNCHER_RESOURCE
from demo.choosing.datasets import NAME, study_datasets
from demo.choosing.runs import StudyRun, study_recipe
from pipeline.recipe.overrides import with_values
from pipeline.reporting.reports import read_report
from pipeline.trained_lora.export.lora_files import layout_file
from pipeline.trained_lora.run_folder import RunLayout, lora_steps
from tests.in_process_launcher import InProcessLauncher


@pytest.mark.timeout(900)
def test_a_job_publishes_the_earliest_of_two_equal_steps(tmp_path: Path) -> None:
    """The rate is nearly 0 in the last three steps, so step 33 draws what step 30 draws."""
    dataset = study_datasets()["few known shapes"]
    drawn = {"steps": 4, "guidance_scale": 2.5, "height": 64, "width": 64}
    recipe = study_recipe(
        StudyRun("few known shapes", 5e-3, 2, 33, 30),
        dataset,
        tmp_path,
        tmp_path / "cache",
        evaluation={
            "prompts": [
                *({"prompt": each.caption, "role": "concept", **drawn} for each in dataset.held_out),
                *({"prompt": each.caption, "role": "base", **drawn} for each in dataset.known[:2]),
            ],
            "pictures": 2,
            "scorers": ["demo.score:WorldScorer"],
            "limits": {"drift": 0.5},
            "publish": "best",
        },
    )
    # Held-out pictures are compared only if they have the concept's trigger word.
    triggers = {("datasets", index, "captions", "trigger"): NAME for index in (0, 1)}
    recipe = with_values(recipe, {**triggers, ("training", "validate_every"): 0}, place=__name__)

    job = build_definitions([recipe]).resolve_job_def(f"{recipe.name}_train")
    assert job.execute_in_process(resources={LAUNCHER_RESOURCE: InProcessLauncher()}).success

    report = read_report(recipe.output_dir, "evaluation")
    checks = read_report(recipe.output_dir, "evaluation_checks")
    assert report is not None
    assert checks is not None
    assert report["decided"], report["why"]
    assert (report["chosen_step"], report["published_step"]) == (30, 30)
    assert {each["name"]: each["passed"] for each in checks["checks"]}["choice_decided"]
    lora = recipe.output_dir / "lora"
    assert json.loads((lora / "provenance.json").read_text("utf-8"))["step"] == 30
    chosen = lora_steps(RunLayout(recipe.output_dir / "runs" / report["run"]))[30]
    file = layout_file("diffusers", "")
    assert (lora / file).read_bytes() == (chosen / file).read_bytes()
