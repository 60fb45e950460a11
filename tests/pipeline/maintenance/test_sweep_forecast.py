"""What `plan` says about a sweep: steps, time and disk space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.maintenance.sweep_forecast import forecast_sweep
from pipeline.maintenance.training_forecast import TrainingForecast
from pipeline.recipe import Recipe
from pipeline.trained_lora.duration import Duration
from pipeline.trained_lora.next_action import NextAction
from pipeline.trained_lora.run_folder import RunLayout, checkpoint_name
from tests.small_recipe import small_recipe

GRID = {"training.learning_rate": [1e-4, 2e-4, 4e-4], "training.lora.rank": [4, 8]}


def swept(tmp_path: Path, training: dict[str, Any], **sweep: Any) -> Recipe:
    datasets = [{"name": "photos", "path": tmp_path / "data", "validation_fraction": 0.2}]
    sections = {"sweep": sweep} if sweep else {}
    return small_recipe(tmp_path, datasets=datasets, training=training, **sections)


def training_of(steps: int, seconds: float) -> TrainingForecast:
    return TrainingForecast(NextAction("new", "0123", steps), 10, Duration(seconds, "a test"), ())


def test_the_forecast_counts_the_steps_of_halving_their_time_and_the_checkpoints(tmp_path: Path) -> None:
    recipe = swept(tmp_path, {"steps": 100}, grid=GRID, seeds=2, halving={"first": 0.25})
    forecast = forecast_sweep(recipe, training_of(100, 50.0))
    assert forecast is not None
    # 6 variants to 25 steps, 3 to 50, 2 to 100.
    assert forecast.steps == 2 * (6 * 25 + 3 * 25 + 2 * 50)
    assert (forecast.variants, forecast.runs, forecast.steps_of_all) == (6, 12, 1200)
    assert forecast.seconds == pytest.approx(0.5 * forecast.steps)
    assert forecast.disk_bytes is None

    checkpoint = RunLayout(recipe.output_dir / "runs" / "0123").checkpoints / checkpoint_name(50)
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").write_bytes(b"x" * 100)
    limited = forecast_sweep(swept(tmp_path, {"steps": 100}, grid=GRID, budget={"steps": 200}), None)
    assert limited is not None
    assert (limited.steps, limited.seconds) == (200, None)
    assert limited.disk_bytes == 6 * 2 * 100, "two checkpoints keep their state"


def test_epochs_count_as_the_steps_of_the_recipe_s_own_training(tmp_path: Path) -> None:
    recipe = swept(tmp_path, {"epochs": 3}, grid=GRID, halving=None)
    forecast = forecast_sweep(recipe, training_of(30, 60.0))
    assert forecast is not None
    assert (forecast.steps, forecast.steps_of_all) == (180, 180)
    assert forecast_sweep(swept(tmp_path, {"epochs": 3}), training_of(30, 60.0)) is None
