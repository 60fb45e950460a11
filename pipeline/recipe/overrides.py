"""Settings of a single run that differ from its recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.recipe.errors import PlacedMistake, find_mistakes, recipe_error
from pipeline.recipe.schema import Recipe

if TYPE_CHECKING:
    from pipeline.recipe.yaml_document import KeyPath

OVERRIDABLE: Mapping[str, KeyPath] = {
    "steps": ("training", "steps"),
    "rank": ("training", "lora", "rank"),
    "learning_rate": ("training", "learning_rate"),
    "seed": ("training", "seed"),
}
"""Recipe key of each setting that a run can override, by the setting's name."""


CONTINUE = "continue_run"
"""Setting of a run that is not a recipe key: the run that it continues, see `trained_lora.continued`."""


def recipe_values(recipe: Recipe) -> dict[str, int | float | None]:
    """Return the recipe's value of each overridable setting; steps are None if the recipe counts epochs."""
    training = recipe.training
    return {
        "steps": training.num_steps if training.epochs is None else None,
        "rank": training.lora.rank,
        "learning_rate": training.learning_rate,
        "seed": training.seed,
    }


def changed_values(recipe: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `values` that differ from the recipe's; None means no override."""
    current = recipe_values(recipe)
    values = {name: value for name, value in values.items() if name != CONTINUE}
    return {name: value for name, value in values.items() if value is not None and value != current[name]}


def with_overrides(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return the recipe with other values, validated like a file; the same object if nothing changes.

    Steps replace epochs. All other keys, including `training.lora.alpha`, keep the recipe's values. `values`
    has the names in `OVERRIDABLE`.

    Raises:
        RecipeError: A value is out of range, or conflicts with the rest of the recipe.
    """
    changes = changed_values(recipe, values)
    if not changes:
        return recipe

    # `exclude_unset` keeps the difference between a default and a key that the recipe sets.
    data = recipe.model_dump(mode="json", exclude_unset=True)

    # Files lack these keys, and `find_mistakes` validates the content of a file.
    identity = {name: data.pop(name) for name in ("name", "source", "output_address") if name in data}
    if "steps" in changes:
        # The two keys exclude each other.
        data.get("training", {}).pop("epochs", None)
    for name, value in changes.items():
        *sections, key = OVERRIDABLE[name]
        holder: dict[str, Any] = data
        for section in sections:
            holder = holder.setdefault(str(section), {})
        holder[str(key)] = value

    if mistakes := find_mistakes(data):
        place = f"overrides of {recipe.source.name}"
        raise recipe_error([PlacedMistake(place, mistake) for mistake in mistakes])
    return Recipe.model_validate_json(json.dumps({**data, **identity}))
