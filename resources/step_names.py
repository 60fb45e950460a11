"""Names of steps, which have the names of recipe and asset, whatever the key of the asset is."""

from __future__ import annotations

_SEPARATOR = "__"


def step_name(recipe: str, asset: str) -> str:
    """Return `<recipe>__<asset>`, the step's name in logs and in run configuration."""
    return f"{recipe}{_SEPARATOR}{asset}"


def step_asset(step_key: str | None) -> tuple[str, str]:
    """Return recipe and asset of a step; the recipe is empty for steps with other names."""
    recipe, _, asset = (step_key or "").rpartition(_SEPARATOR)
    return recipe, asset
