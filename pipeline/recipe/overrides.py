"""Settings of a single run or of a variant that differ from its recipe."""

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


_EXCLUDED: Mapping[KeyPath, str] = {("training", "steps"): "epochs", ("training", "epochs"): "steps"}
"""Key of `training` that a key replaces, because the two exclude each other."""

_PLACES = ("name", "source", "output_address", "packed_paths")
"""Fields of a loaded recipe that its file does not have."""

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

    by_path = {OVERRIDABLE[name]: value for name, value in changes.items()}
    return with_values(recipe, by_path, place=f"overrides of {recipe.source.name}")


def with_values(recipe: Recipe, values: Mapping[KeyPath, Any], *, place: str) -> Recipe:
    """Return the recipe with other values at some keys, validated like a file; `place` is for its mistakes.

    Raises:
        RecipeError: A key is unknown, or a value is out of range or conflicts with the rest of the recipe.
    """
    # `exclude_unset` keeps the difference between a default and a key that the recipe sets.
    data = recipe.model_dump(mode="json", exclude_unset=True)

    # Files lack these keys, and `find_mistakes` validates the content of a file.
    identity = {name: data.pop(name) for name in _PLACES if name in data}
    for path, value in values.items():
        if (other := _EXCLUDED.get(path)) is not None:
            data.get("training", {}).pop(other, None)
        _set(data, path, value)

    if mistakes := find_mistakes(data):
        raise recipe_error([PlacedMistake(place, mistake) for mistake in mistakes])
    return Recipe.model_validate_json(json.dumps({**data, **identity}))


def _set(data: dict[str, Any], path: KeyPath, value: Any) -> None:
    holder: Any = data
    for part in path[:-1]:
        # A section that the recipe does not have, or has as null.
        if isinstance(part, str) and holder.get(part) is None:
            holder[part] = {}
        holder = holder[part]
    holder[path[-1]] = value
