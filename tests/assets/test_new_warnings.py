"""Which warnings of real runs are new."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from dagster import (
    AssetKey,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
)
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import create_execution_plan, execute_run

from assets.new_warnings import new_warnings
from pipeline.recipe import Recipe
from tests.assets.nightly_job import JOB, Location, recipe_with_images


@pytest.fixture
def recipe(tmp_path: Path, tiny_sd: Path) -> Recipe:
    return recipe_with_images(tmp_path, tiny_sd)


@pytest.mark.parametrize("by_assets", [False, True], ids=["from failure", "from asset failure"])
def test_a_warning_of_a_run_that_a_retry_continues_is_new_once(
    recipe: Recipe, instance: DagsterInstance, tmp_path: Path, by_assets: bool
) -> None:
    location, caption = Location(recipe, instance), tmp_path / "data" / "rose.txt"
    location.run()
    (tmp_path / "data" / "orphan.txt").write_text("a caption without an image", encoding="utf-8")
    caption.unlink()
    failed = location.run()
    assert not failed.success, "after the step of raw_images, which has the warning"

    job = location.definitions.resolve_job_def(JOB)
    failed_assets = frozenset({AssetKey(["flowers", "validated_dataset"])}) if by_assets else None
    tag = "dagster/is_asset_resume_retry" if by_assets else "dagster/is_resume_retry"
    retry = instance.create_run_for_job(
        job.get_subset(asset_selection=failed_assets),
        asset_selection=failed_assets,
        status=DagsterRunStatus.SUCCESS,
        tags={tag: "true"},
        root_run_id=failed.run_id,
        parent_run_id=failed.run_id,
    )
    new = new_warnings(instance, retry)
    assert [problem.where for problem in new] == ["flowers/raw_images, check oddities"]

    caption.write_text("a rose", encoding="utf-8")
    following = instance.get_run_by_id(location.run().run_id)
    assert following is not None
    assert following.is_success
    assert new_warnings(instance, following) == []


def test_a_warning_is_known_after_runs_of_other_assets_or_steps_of_the_job(
    recipe: Recipe, instance: DagsterInstance, tmp_path: Path
) -> None:
    (tmp_path / "data" / "orphan.txt").write_text("a caption without an image", encoding="utf-8")
    nightly = Location(recipe, instance).definitions.resolve_job_def(JOB)

    def warnings(
        *, assets: Collection[str] | None = None, step: str | None = None, parent: str | None = None
    ) -> tuple[list[str], str]:
        """Return the new warnings of a run of the job, and its id."""
        selection = None if assets is None else frozenset(AssetKey(["flowers", name]) for name in assets)
        job = nightly.get_subset(asset_selection=selection)
        plan = None if step is None else create_execution_plan(job, step_keys_to_execute=[step])
        run = instance.create_run_for_job(
            job, execution_plan=plan, asset_selection=selection, parent_run_id=parent, root_run_id=parent
        )
        execute_run(InMemoryJob(job), run, instance)
        ended = instance.get_run_by_id(run.run_id)
        assert ended is not None
        assert ended.is_success
        return [problem.where for problem in new_warnings(instance, ended)], run.run_id

    new, complete = warnings()
    assert "flowers/raw_images, check oddities" in new
    # As "Materialize all" on the job's page starts it.
    assert warnings(assets=["raw_images", "validated_dataset"])[0] == []
    assert warnings(step="flowers__validated_dataset", parent=complete)[0] == []
    assert warnings()[0] == []
    assert warnings(assets=["validated_dataset"])[0] == []

    (tmp_path / "data" / "orphan.txt").unlink()
    assert warnings()[0] == []
    (tmp_path / "data" / "orphan.txt").write_text("a caption without an image", encoding="utf-8")
    assert warnings(step="flowers__validated_dataset", parent=complete)[0] == []
    assert warnings()[0] == ["flowers/raw_images, check oddities"]


def test_a_warning_is_known_after_many_hand_selected_runs_of_other_assets(
    recipe: Recipe, instance: DagsterInstance, tmp_path: Path
) -> None:
    (tmp_path / "data" / "orphan.txt").write_text("a caption without an image", encoding="utf-8")
    by_hand = Location(recipe, instance).definitions.get_repository_def().get_job("__ASSET_JOB")

    job = by_hand.get_subset(asset_selection={AssetKey(["flowers", "raw_images"])})
    others = frozenset({AssetKey(["flowers", "aspect_buckets"])})

    def materialize() -> DagsterRun:
        run = instance.create_run_for_job(job, asset_selection=job.asset_selection)
        assert execute_run(InMemoryJob(job), run, instance).success
        return run

    assert new_warnings(instance, materialize()) != []
    for _ in range(101):
        instance.add_run(DagsterRun(job.name, asset_selection=others, status=DagsterRunStatus.SUCCESS))
    assert new_warnings(instance, materialize()) == []
