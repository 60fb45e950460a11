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
from pipeline.errors import DatasetError
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.recipe.outputs import mirror_of


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
