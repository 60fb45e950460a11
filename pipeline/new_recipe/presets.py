"""Published settings for a goal and a family of base models, for `latentline new --preset`.

presets.toml has the settings, each with its source.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from pipeline.errors import LatentlineError, RecipeError
from pipeline.models.diffusers_folder import index_file
from pipeline.models.families import detect
from pipeline.recipe import in_project

Goal = Literal["subject", "style", "edit"]

GOALS: tuple[Goal, ...] = get_args(Goal)


@dataclass(frozen=True)
class Preset:
    """Settings for some goals with a family of base models.

    Attributes:
        base: Parts of a Hub id or path, in lower case, that name a base model of the family.
        settings: Recipe keys with dots, such as `training.steps`, and their values.
    """

    family: str
    base: tuple[str, ...]
    goals: tuple[Goal, ...]
    source: str
    settings: dict[str, Any]


@cache
def presets() -> tuple[Preset, ...]:
    """Return all presets."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return tuple(
        Preset(
            family=each["family"],
            base=tuple(each["base"]),
            goals=tuple(each["goals"]),
            source=each["source"],
            settings=each["settings"],
        )
        for each in tomllib.loads(text)["presets"]
    )


def find_preset(goal: Goal, base: str) -> Preset:
    """Return the preset for a goal and a base model, given by a local folder or a Hub id.

    Raises:
        RecipeError: No settings are published for them; the message lists families and goals that have some.
    """
    family = _local_family(base)
    matching = [each for each in presets() if each.family == family or (not family and _names(each, base))]
    # The longest part, because qwen/qwen-image is also a part of qwen/qwen-image-edit.
    longest = max((_length(each, base) for each in matching), default=0)
    for preset in matching:
        if goal in preset.goals and (family or _length(preset, base) == longest):
            return preset

    known = dict.fromkeys(f"{each.family} ({', '.join(each.goals)})" for each in presets())
    raise RecipeError(
        f"no settings are known for --preset {goal} with the base model {base}",
        where="pipeline/new_recipe/presets.toml",
        fix=f"omit --preset, or use a base model of {', '.join(known)}",
    )


def _local_family(base: str) -> str | None:
    folder = in_project(base)
    if not index_file(folder).is_file():
        return None
    try:
        return detect(folder).spec.name
    except LatentlineError:  # loading the recipe reports what is wrong with the model
        return None


def _names(preset: Preset, base: str) -> bool:
    return _length(preset, base) > 0


def _length(preset: Preset, base: str) -> int:
    return max((len(part) for part in preset.base if part in base.lower()), default=0)
