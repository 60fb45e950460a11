"""Outputs at an address, and errors while they are pulled or pushed."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import build_asset_context

from assets.mirroring import mirrored_outputs
from assets.run_summary import pull_reports
from pipeline.errors import DatasetError, TrainingError
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.recipe.outputs import mirror_of
from pipeline.trained_lora.run_folder import RunLayout, run_folder
from pipeline.trained_lora.run_mirror import mirrored_run


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[Recipe]:
    values = {
        "datasets": [{"name": "photos", "path": tmp_path / "data"}],
        "cache_dir": tmp_path / "cache",
        "output_dir": f"memory://{uuid.uuid4().hex}",
        "model": {"base": "models/none"},
    }
    recipe = recipe_from_mapping("flowers", values)
    yield recipe
    shutil.rmtree(recipe.output_dir, ignore_errors=True)


def block_working_copy(recipe: Recipe) -> None:
    """Let the working copy's state be unwritable: a folder takes the place of its lock file."""
    lock = recipe.output_dir / ".mirror.lock"
    lock.unlink(missing_ok=True)
    lock.mkdir(parents=True)


def run_step(recipe: Recipe, error: Exception | None) -> None:
    """Write a table whose upload fails, then raise `error`."""
    with mirrored_outputs(build_asset_context(), recipe, "raw_images"):
        (recipe.output_dir / "tables").mkdir(parents=True)
        (recipe.output_dir / "tables" / "raw_images.parquet").write_bytes(b"table")
        block_working_copy(recipe)
        if error is not None:
            raise error


def test_an_upload_that_fails_does_not_hide_the_error_of_the_step(recipe: Recipe) -> None:
    error = DatasetError("the folder contains no images", where="data", fix="add images")
    with pytest.raises(DatasetError, match="no images"):
        run_step(recipe, error)


def test_an_upload_that_fails_ends_a_step_that_succeeded(recipe: Recipe) -> None:
    with pytest.raises(OSError, match=r"\.mirror\.lock"):
        run_step(recipe, None)


def test_reports_that_cannot_be_pulled_are_missing_from_the_summary(recipe: Recipe) -> None:
    report = recipe.output_dir / "reports" / "raw_images.json"
    report.parent.mkdir(parents=True)
    report.write_text("{}", encoding="utf-8")
    mirror_of(recipe).push("reports/*.json")
    shutil.rmtree(recipe.output_dir)
    block_working_copy(recipe)
    pull_reports([recipe])


def test_a_step_that_lost_its_run_leaves_the_lora_that_the_other_machine_published(recipe: Recipe) -> None:
    weights, export = "lora/pytorch_lora_weights.safetensors", "runs/exported_step.json"
    remote = mirror_of(recipe).remote
    for name in (weights, export):
        remote.put(name, b"before")
    layout = RunLayout(run_folder(recipe.output_dir, "0123456789abcdef"))

    def lose_run() -> None:
        with (
            mirrored_outputs(build_asset_context(), recipe, "trained_lora"),
            mirrored_run(recipe, layout, print) as run,
            run.publishing(),
        ):
            (recipe.output_dir / weights).write_bytes(b"of this machine")
            (recipe.output_dir / export).unlink()
            remote.put("runs/0123456789abcdef/lease", b'{"machine": "two", "copy": "two", "token": "two"}')
            remote.put(weights, b"of the other")

    with pytest.raises(TrainingError, match="another machine took over the run"):
        lose_run()
    assert (remote.read(weights), remote.read(export)) == (b"of the other", b"before")


def test_a_lora_that_was_not_uploaded_is_not_uploaded_by_a_step_without_its_run(recipe: Recipe) -> None:
    """It may be older than the one that another machine is about to publish."""
    lora = recipe.output_dir / "lora" / "pytorch_lora_weights.safetensors"
    with mirrored_outputs(build_asset_context(), recipe, "trained_lora"):
        lora.parent.mkdir(parents=True)
        lora.write_bytes(b"of this machine")
    assert mirror_of(recipe).names("lora/*") == []
