"""A minimal recipe for tests of the section `model`."""

from __future__ import annotations

from pathlib import Path

from pipeline.recipe import Recipe, recipe_from_mapping


def recipe(tmp_path: Path, base: Path | str, **model: object) -> Recipe:
    """Return a recipe with all folders below `tmp_path`, and `model` as further keys of that section."""
    return recipe_from_mapping(
        "sample",
        {
            "datasets": [{"name": "photos", "path": str(tmp_path / "photos")}],
            "output_dir": str(tmp_path / "out"),
            "cache_dir": str(tmp_path / "cache"),
            "model": {"base": str(base), **model},
        },
    )
