"""Recipes are strict, frozen, documented, and survive the way into a child process."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.recipe.keys import field_below
from pipeline.recipe.schema import RecipeFile, all_keys

SMALLEST: dict[str, Any] = {
    "datasets": [{"name": "photos", "path": "data/photos"}],
    "output_dir": "outputs/x",
    "model": {"base": "owner/name"},
}


def test_a_recipe_survives_json_and_is_hashable():
    values = {
        **SMALLEST,
        "datasets": [
            {"name": "a", "path": "a", "captions": {"from": "fixed", "text": "a rose"}},
            {"name": "b", "path": Path("b"), "captions": {"from": "filename"}, "repeats": 3},
        ],
        "checks": {"allow": ["captions_present"]},
        "recache": {"cron": None},
    }
    recipe = recipe_from_mapping("x", values)
    copy = Recipe.model_validate_json(recipe.model_dump_json())
    assert copy == recipe
    assert hash(copy) == hash(recipe)
    assert copy.datasets[0].captions.from_ == "fixed"


def test_a_recipe_and_its_sections_cannot_be_changed():
    recipe = recipe_from_mapping("x", SMALLEST)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.training.steps = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError, match="frozen"):
        recipe.name = "y"  # pyright: ignore[reportAttributeAccessIssue]


def test_the_defaults_are_those_of_the_design():
    recipe = recipe_from_mapping("x", SMALLEST)
    assert (recipe.buckets.resolution, recipe.buckets.step) == (1024, 64)
    assert (recipe.latents.dtype, recipe.latents.posterior) == ("float16", "sample")
    assert recipe.text.caption_dropout == 0.1
    assert recipe.checks.max_rejected_fraction == 0.05
    assert (recipe.recache.cron, recipe.recache.on_change, recipe.recache.enabled) == (
        "H 3 * * *",
        True,
        False,
    )


def test_every_key_has_a_description():
    for key in all_keys():
        info = field_below(RecipeFile, tuple(key.split(".")))
        assert info is not None
        assert info.description, key
