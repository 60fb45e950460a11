"""Recipes with an output folder at an address: loading and path isolation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import PathIsolationError, RecipeError
from pipeline.outputs.folder import outputs_of
from pipeline.outputs.stage_files import fetch_stage
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.recipe.isolation import check_isolation
from pipeline.storage.addresses import Url


def recipe_with(output: str, name: str = "flowers", **values: Any) -> Recipe:
    defaults = {"datasets": [{"name": "photos", "path": "/data/photos"}], "model": {"base": "a/b"}}
    return recipe_from_mapping(name, {**defaults, "output_dir": output, **values})


def test_an_address_becomes_a_working_copy_of_its_own() -> None:
    recipe = recipe_with("s3://bucket/flowers")
    assert recipe.output_address == Url("s3://bucket/flowers")
    assert recipe.output_dir.parts[-3:-1] == (".cache", "scratch")
    assert recipe.output_dir == recipe_with("s3://bucket/flowers/").output_dir
    others = [recipe_with("s3://bucket/other"), recipe_with("s3://bucket/flowers", name="roses")]
    assert len({recipe.output_dir, *(other.output_dir for other in others)}) == 3
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_a_recipe_stored_by_an_older_version_has_its_folder_as_address() -> None:
    recipe = recipe_with("/outputs/flowers")
    stored = recipe.model_dump_json(exclude={"output_address"})
    assert Recipe.model_validate_json(stored) == recipe
    assert recipe.output_address == recipe.output_dir == Path("/outputs/flowers")


@pytest.mark.parametrize(
    ("output", "changes"),
    [
        ("s3://bucket/photos/out", {"datasets": [{"name": "photos", "path": "s3://bucket/photos"}]}),
        ("s3://bucket", {"datasets": [{"name": "photos", "path": "s3a://Bucket/photos"}]}),
        ("s3://bucket/cache/out", {"cache_dir": "s3://bucket/cache"}),
        ("s3://bucket", {"cache_dir": "s3://bucket/cache"}),
        ("s3://bucket/both", {"cache_dir": "s3://bucket/both"}),
    ],
    ids=["in a dataset", "around a dataset", "in the cache", "around the cache", "the cache"],
)
def test_an_address_that_overlaps_another_is_refused(output: str, changes: dict[str, Any]) -> None:
    (conflict,) = check_isolation(recipe_with(output, **changes))
    assert "output_dir" in conflict.what()


def test_a_working_copy_inside_a_dataset_is_refused_before_anything_is_written() -> None:
    separate = recipe_with("memory://isolated/flowers")
    scratch = separate.output_dir.parent
    recipe = recipe_with("memory://isolated/flowers", datasets=[{"name": "photos", "path": str(scratch)}])
    existed = recipe.output_dir.exists()
    with pytest.raises(PathIsolationError, match="the working copy of output_dir is inside dataset photos"):
        fetch_stage(outputs_of(recipe), "raw_images", checks_only=False)
    assert recipe.output_dir.exists() == existed


@pytest.mark.parametrize("address", ["sftp://host/out", "gs://bucket/out", "zip://out::s3://bucket/a.zip"])
def test_an_address_without_conditional_writes_is_a_mistake_with_a_fix(address: str) -> None:
    with pytest.raises(RecipeError, match="output_dir must be a folder, or an address on S3") as caught:
        recipe_with(address)
    assert "use a folder or an s3:// address" in str(caught.value)
    assert recipe_with("/outputs/flowers", cache_dir="sftp://host/cache").cache_dir == Url(
        "sftp://host/cache"
    )
