"""The smallest recipe, for tests that encode and train nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.recipe import Recipe, recipe_from_mapping


def small_recipe(root: Path, name: str = "flowers", **sections: Any) -> Recipe:
    """Return a recipe whose folders are below `root`, with `sections` in place of the usual ones."""
    fields = {
        "datasets": [{"name": "photos", "path": root / "data"}],
        "cache_dir": root / "cache",
        "output_dir": root / "out",
        "model": {"base": "models/none"},
    }
    return recipe_from_mapping(name, fields | sections)
