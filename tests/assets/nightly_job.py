"""A job of the first two assets of a recipe, with real images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dagster import (
    AssetKey,
    AssetSelection,
    DagsterInstance,
    Definitions,
    build_run_status_sensor_context,
    define_asset_job,
)
from PIL import Image

from assets.definitions import build_definitions
from pipeline.recipe import Recipe
from tests.small_recipe import small_recipe

JOB = "flowers_nightly"


def recipe_with_images(tmp_path: Path, tiny_sd: Path) -> Recipe:
    """Write two images with captions, and return a recipe for them."""
    (tmp_path / "data").mkdir()
    for name, width in (("rose", 64), ("lily", 60)):
        Image.radial_gradient("L").resize((width, 48)).save(tmp_path / "data" / f"{name}.png")
        (tmp_path / "data" / f"{name}.txt").write_text(f"a {name}", encoding="utf-8")
    return small_recipe(tmp_path, model={"base": tiny_sd})


class Location:
    """The code location of a recipe, with a job of its first two assets."""

    def __init__(self, recipe: Recipe, instance: DagsterInstance) -> None:
        keys = [AssetKey(["flowers", name]) for name in ("raw_images", "validated_dataset")]
        nightly = define_asset_job(JOB, AssetSelection.assets(*keys))
        self.definitions = Definitions.merge(build_definitions([recipe]), Definitions(jobs=[nightly]))
        self.instance = instance

    def run(self) -> Any:
        nightly = self.definitions.resolve_job_def(JOB)
        return nightly.execute_in_process(instance=self.instance, raise_on_error=False)

    def evaluate(self, sensor: str, result: Any) -> Any:
        """Evaluate an alert's sensor for a run, as the daemon does after its end."""
        event = result.get_run_failure_event() if not result.success else result.get_run_success_event()
        run = self.instance.get_run_by_id(result.run_id)
        assert run is not None
        context = build_run_status_sensor_context(
            sensor_name=sensor, dagster_instance=self.instance, dagster_run=run, dagster_event=event
        )
        if sensor == "failure_alerts":
            context = context.for_run_failure()
        return self.definitions.get_repository_def().get_sensor_def(sensor)(context)
