"""Overrides of a recipe for a single run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import RecipeError
from pipeline.recipe import (
    OVERRIDABLE,
    Recipe,
    changed_values,
    recipe_from_mapping,
    recipe_values,
    with_overrides,
)
from pipeline.recipe.keys import field_below
from pipeline.recipe.schema import RecipeFile


def recipe(**training: Any) -> Recipe:
    values = {
        "datasets": [{"name": "photos", "path": "data/photos"}],
        "output_dir": "out",
        "model": {"base": "owner/name"},
        "training": training,
    }
    return recipe_from_mapping("flowers", values)


def test_every_overridable_name_is_a_key_with_a_value() -> None:
    assert set(recipe_values(recipe())) == set(OVERRIDABLE)
    assert [name for name, path in OVERRIDABLE.items() if field_below(RecipeFile, path) is None] == []


def test_the_values_of_the_recipe_change_nothing() -> None:
    overridden = recipe(steps=8, learning_rate=1)
    assert with_overrides(overridden, recipe_values(overridden)) is overridden
    assert with_overrides(overridden, {}) is overridden
    assert with_overrides(overridden, {"learning_rate": 1.0, "steps": None}) is overridden


def test_overrides_replace_their_keys_and_no_others() -> None:
    overridden = recipe(steps=8, lora={"alpha": 4.0}, optimizer_arguments={"weight_decay": 0.1})
    overrides_given = {"steps": 3, "rank": 2, "learning_rate": 0.5, "seed": 7}
    changed = with_overrides(overridden, overrides_given)
    assert recipe_values(changed) == overrides_given
    assert changed_values(overridden, {**overrides_given, "seed": 42}) == {
        name: overrides_given[name] for name in overrides_given if name != "seed"
    }
    before, after = overridden.model_dump(), changed.model_dump()
    for values in (before, after):
        for path in OVERRIDABLE.values():
            holder: Any = values
            for section in path[:-1]:
                holder = holder[section]
            del holder[path[-1]]
    assert before == after
    assert changed.training.lora.alpha == 4.0


def test_steps_replace_epochs() -> None:
    overridden = recipe(epochs=3)
    assert recipe_values(overridden)["steps"] is None
    changed = with_overrides(overridden, {"steps": 5})
    assert (changed.training.steps, changed.training.epochs) == (5, None)
    assert with_overrides(overridden, {"seed": 1}).training.epochs == 3


@pytest.mark.parametrize(
    ("overrides_given", "key"),
    [
        ({"steps": 0}, "training.steps"),
        ({"steps": 4}, "training.warmup_steps"),
        ({"rank": -1}, "training.lora.rank"),
        ({"learning_rate": float("nan")}, "training.learning_rate"),
        ({"seed": -1}, "training.seed"),
    ],
    ids=str,
)
def test_overrides_are_validated_like_the_recipe(overrides_given: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError) as raised:
        with_overrides(recipe(steps=8, warmup_steps=5), overrides_given)
    assert raised.value.where == f"overrides of flowers.yaml, {key}"


def test_a_recipe_from_a_file_keeps_its_paths(tmp_path: Path) -> None:
    file = tmp_path / "flowers.yaml"
    overridden = recipe().model_copy(update={"source": file})
    changed = with_overrides(overridden, {"seed": 1})
    assert (changed.source, changed.cache_dir, changed.datasets) == (
        file,
        overridden.cache_dir,
        overridden.datasets,
    )
