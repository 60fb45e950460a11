"""A variant of a sweep as a recipe of its own: its settings, and its run without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import RecipeError
from pipeline.new_recipe.chosen_settings import with_settings
from pipeline.new_recipe.sweep_variant import find_variant, take_over_run
from pipeline.storage.tables import Tables, frame
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.conftest import finished_once, one_thread, trained
from tests.pipeline.trained_lora.project import Project
from tests.pipeline.trained_lora.runs import run, run_folders

__all__ = ["finished_once", "one_thread", "trained"]


def row(variant: int, run: str, step: int, **overrides: Any) -> dict[str, Any]:
    values = {"variant": variant, "seed": 7, "overrides": json.dumps(overrides), "run": run, "step": step}
    judged = {"score": 1.0, "behind": 0.0, "low": 0.0, "high": 0.0}
    return {**values, **judged, "promoted": True, "steps": step, "error": None}


def write_sweep(output: Path, *rows: dict[str, Any]) -> None:
    Tables(output).write("sweep", frame("sweep", list(rows)))


def test_R21_a_recipe_that_takes_over_a_variant_finds_its_run_finished_under_its_own_name(
    trained: Project,
) -> None:
    (folder,) = run_folders(trained)
    write_sweep(trained.recipe.output_dir, row(7, folder.name, 4, **{"training.learning_rate": 0.01}))
    variant = find_variant(trained.recipe, 7)
    assert (variant.run, variant.settings) == (folder.name, {"training.learning_rate": 0.01})

    other = trained.changed("best")
    other.recipe = other.recipe.model_copy(update={"name": "best"})
    taken = take_over_run(trained.recipe, variant, other.recipe)
    assert taken == other.recipe.output_dir / "runs" / folder.name
    weights = Path("lora", "pytorch_lora_weights.safetensors")
    assert (taken / weights).samefile(folder / weights), "a hard link"
    metrics = Path("logs", "metrics.jsonl")
    assert not (taken / metrics).samefile(folder / metrics), "logs are appended to"

    launch = InProcessLaunch()
    result = run(other, launch)
    assert (result.report["launched"], result.report["from_checkpoint"]) == (False, False)
    assert launch.modules == []
    names = sorted(path.name for path in (other.recipe.output_dir / "lora").glob("*.safetensors"))
    assert names == [
        "best_comfyui.safetensors",
        "best_kohya.safetensors",
        "pytorch_lora_weights.safetensors",
    ]
    assert run(trained, launch).report["launched"] is False
    assert launch.modules == [], "the other recipe's run stays complete"
    assert take_over_run(trained.recipe, variant, other.recipe) is None, "no run is replaced"


def test_an_unknown_variant_is_an_error_with_the_numbers_to_choose_from(trained: Project) -> None:
    with pytest.raises(RecipeError, match="the recipe demo has no table of a sweep"):
        find_variant(trained.recipe, 1)
    write_sweep(trained.recipe.output_dir, row(1, "a", 4), row(2, "b", 4))
    with pytest.raises(RecipeError) as raised:
        find_variant(trained.recipe, 3)
    assert raised.value.fix == "use one of 1, 2"


def test_settings_of_a_dataset_are_set_in_the_dataset_of_that_name() -> None:
    text = "datasets:\n  - name: a\n  - name: b\n    repeats: 1\nsweep: {}\n"
    changed = with_settings(
        text, {"datasets.b.repeats": 3, "datasets.a.captions.trigger": "sks", "sweep": None}
    )
    assert (
        changed == "datasets:\n  - name: a\n    captions:\n      trigger: sks\n  - name: b\n    repeats: 3\n"
    )
