"""The variants of a sweep: the recipe with other values at the keys that vary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import RecipeError
from pipeline.recipe.overrides import with_values
from pipeline.recipe.sweep import SweepSettings, is_logarithmic, key_path

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.recipe.sweep import RandomSettings

_DIGITS = 3
"""Significant digits of random values, so that a person can write them into a recipe."""


@dataclass(frozen=True)
class Variant:
    """One variant of a recipe.

    Attributes:
        number: Number in the order of the sweep, from 1.
        overrides: Values by swept key.
        recipes: The recipe of each seed: a plain recipe with these values, without the section `sweep`.
    """

    number: int
    overrides: Mapping[str, Any]
    recipes: tuple[Recipe, ...]

    @property
    def text(self) -> str:
        """The variant in messages, such as "variant 3 (learning_rate 0.0003, lora.rank 8)"."""
        return f"variant {self.number} ({overrides_text(self.overrides)})"


def overrides_text(overrides: Mapping[str, Any]) -> str:
    """Return the values in words, without the section of keys of `training`."""
    return ", ".join(
        f"{key.removeprefix('training.')} {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in overrides.items()
    )


def require_sweep(recipe: Recipe) -> SweepSettings:
    """Return the section `sweep`; raise RecipeError if the recipe has none."""
    if recipe.sweep is None:
        raise RecipeError(
            "the recipe has no section sweep",
            where=str(recipe.source),
            fix="add it, such as sweep: {grid: {training.learning_rate: [1.0e-4, 3.0e-4]}}",
        )
    return recipe.sweep


def variants(recipe: Recipe) -> list[Variant]:
    """Return all variants of the recipe, in the order of the grid or of the draws.

    Raises:
        RecipeError: The recipe has no section `sweep`, or a variant is not a valid recipe.
    """
    settings = require_sweep(recipe)
    plain = recipe.model_copy(update={"sweep": None})
    return [
        Variant(number, overrides, _recipes(plain, settings, number, overrides))
        for number, overrides in enumerate(variant_values(settings), start=1)
    ]


def variant_values(settings: SweepSettings) -> list[dict[str, Any]]:
    """Return the values of each variant; of a grid, the last key varies fastest."""
    if settings.random is not None:
        return [_drawn(settings.random, number) for number in range(settings.random.count)]
    grid = settings.grid.given()
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def _drawn(settings: RandomSettings, number: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, ends in settings.ranges.given().items():
        values[key] = _in_range(ends, _uniform(settings.seed, number, key), logarithmic=is_logarithmic(key))
    for key, choices in settings.choices.given().items():
        values[key] = choices[int(_uniform(settings.seed, number, key) * len(choices))]
    return values


def _uniform(seed: int, number: int, key: str) -> float:
    # Each value has a generator of its own: more variants or keys do not change the others.
    digest = hashlib.sha256(key.encode("utf-8")).digest()
    return float(np.random.default_rng([seed, number, int.from_bytes(digest[:8])]).random())


def _in_range(ends: tuple[int | float, int | float], uniform: float, *, logarithmic: bool) -> int | float:
    low, high = ends
    if isinstance(low, int) and isinstance(high, int):
        return low + int(uniform * (high - low + 1))
    value = low * (high / low) ** uniform if logarithmic else low + (high - low) * uniform
    return min(float(high), max(float(low), float(f"{value:.{_DIGITS}g}")))


def _recipes(
    plain: Recipe, settings: SweepSettings, number: int, overrides: Mapping[str, Any]
) -> tuple[Recipe, ...]:
    names = [dataset.name for dataset in plain.datasets]
    values = {path: value for key, value in overrides.items() if (path := key_path(key, names)) is not None}
    place = f"variant {number} of the sweep of {plain.source.name} ({overrides_text(overrides)})"
    recipe = with_values(plain, values, place=place)
    first_seed = recipe.training.seed
    return tuple(
        recipe if number == 0 else _with_seed(recipe, first_seed + number) for number in range(settings.seeds)
    )


def _with_seed(recipe: Recipe, seed: int) -> Recipe:
    return with_values(recipe, {("training", "seed"): seed}, place=f"training.seed of {recipe.source.name}")
