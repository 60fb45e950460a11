"""Settings of one run that differ from its recipe, given when the run is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.recipe.mistakes import PlacedMistake, find_mistakes, recipe_error
from pipeline.recipe.schema import Recipe

if TYPE_CHECKING:
    from pipeline.recipe.locate import KeyPath

OVERRIDABLE: Mapping[str, KeyPath] = {
    "steps": ("training", "steps"),
    "rank": ("training", "lora", "rank"),
    "learning_rate": ("training", "learning_rate"),
    "seed": ("training", "seed"),
}
"""Names that a run may give, and the recipe's keys that they stand for."""


def recipe_values(recipe: Recipe) -> dict[str, int | float | None]:
    """What the recipe says under each name of `OVERRIDABLE`; steps are None where it counts epochs."""
    training = recipe.training
    return {
        "steps": training.num_steps if training.epochs is None else None,
        "rank": training.lora.rank,
        "learning_rate": training.learning_rate,
        "seed": training.seed,
    }


def differing(recipe: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values`, by name, that are not what the recipe says anyway; None says nothing."""
    own = recipe_values(recipe)
    return {name: value for name, value in values.items() if value is not None and value != own[name]}


def with_overrides(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with other values, checked as if its file said so; itself when nothing differs.

    Steps take the place of epochs. Everything else, `training.lora.alpha` too, stays as the recipe says.

    Args:
        recipe: As loaded.
        values: By names of `OVERRIDABLE`.

    Raises:
        RecipeError: A value is out of range, or doesn't go with the rest of the recipe.
    """
    changes = differing(recipe, values)
    if not changes:
        return recipe
    data = recipe.model_dump(mode="json", exclude_unset=True)
    identity = {name: data.pop(name) for name in ("name", "source")}
    if "steps" in changes:
        data.get("training", {}).pop("epochs", None)
    for name, value in changes.items():
        *sections, key = OVERRIDABLE[name]
        holder: dict[str, Any] = data
        for section in sections:
            holder = holder.setdefault(str(section), {})
        holder[str(key)] = value
    if mistakes := find_mistakes(data):
        place = f"the run's own settings over {recipe.source.name}"
        raise recipe_error([PlacedMistake(place, mistake) for mistake in mistakes])
    return Recipe.model_validate_json(json.dumps({**data, **identity}))
