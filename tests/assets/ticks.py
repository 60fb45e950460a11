"""Ticks of the sensor that watches datasets, with a real instance and real folders."""

from __future__ import annotations

from pathlib import Path

from dagster import (
    AssetKey,
    AssetMaterialization,
    DagsterInstance,
    DagsterRunStatus,
    RepositoryDefinition,
    build_sensor_context,
    job,
)

from assets.definitions import build_definitions
from assets.sources import DATA_VERSION_TAG
from pipeline.raw_images.scan_fingerprint import scan_fingerprint
from pipeline.recipe import Recipe
from resources.run_names import ATTEMPT_TAG, RECIPE_TAG
from tests.small_recipe import small_recipe

ENABLED = {"enabled": True}

CACHED = ("raw_images", "validated_dataset", "aspect_buckets", "vae_latents", "text_embeddings")
"""Assets of the cache job."""


def recipe(folder: Path, **recache: object) -> Recipe:
    """Return a recipe with an enabled sensor and a folder of images."""
    (folder / "data").mkdir(exist_ok=True)
    return small_recipe(folder, recache={"enabled": True, **recache})


def repository_of(recipe: Recipe) -> RepositoryDefinition:
    """Return the code location of one recipe."""
    return build_definitions([recipe]).get_repository_def()


class Ticks:
    """Ticks of one sensor, each with the cursor of the previous one."""

    def __init__(self, folder: Path, instance: DagsterInstance) -> None:
        self.folder = folder
        self.repository = repository_of(recipe(folder))
        self.sensor = self.repository.get_sensor_def("flowers_dataset_changed")
        self.instance = instance
        self.cursor: str | None = None
        self.attempts: list[str] = []

    def evaluate(self, status: DagsterRunStatus = DagsterRunStatus.SUCCESS) -> str:
        """Return "run" for a requested run, which then ends in `status`, and the skip reason otherwise."""
        context = build_sensor_context(
            self.instance, cursor=self.cursor, repository_def=self.repository, sensor_name=self.sensor.name
        )
        result = self.sensor.evaluate_tick(context)
        self.cursor = result.cursor
        for request in result.run_requests or []:
            self.attempts.append(request.tags[ATTEMPT_TAG])
            assert request.run_key is None, "with a run key, an earlier state would never run again"
            assert request.tags[RECIPE_TAG] == "flowers"
            self.record("flowers_cache", status)
        return "run" if result.run_requests else str(result.skip_message)

    def record(self, job: str, status: DagsterRunStatus) -> str:
        """Record a run of the recipe that has ended in `status`, and return its id.

        After a success, the versions of its tables are those of the files.
        """
        tags = {RECIPE_TAG: "flowers"}
        if status == DagsterRunStatus.SUCCESS:
            versions = {DATA_VERSION_TAG: scan_fingerprint([self.folder / "data"])}
            for name in CACHED:
                table = AssetMaterialization(AssetKey(["flowers", name]), tags=versions)
                self.instance.report_runless_asset_event(table)
        job_def = self.repository.get_job(job)
        return self.instance.create_run_for_job(job_def, status=status, tags=tags).run_id


@job
def empty_job() -> None:
    """A job without steps, of which runs can be recorded in any status."""
