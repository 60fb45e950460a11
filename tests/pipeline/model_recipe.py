"""A recipe that is about its model: the rest is the least that a recipe needs."""

from __future__ import annotations

from pathlib import Path

from pipeline.recipe import Recipe, recipe_from_mapping


def recipe(tmp_path: Path, base: Path | str, **model: object) -> Recipe:
    """Of photos, cache and output below `tmp_path`; `model` are further keys of its section."""
    return recipe_from_mapping(
        "sample",
        {
            "datasets": [{"name": "photos", "path": str(tmp_path / "photos")}],
            "output_dir": str(tmp_path / "out"),
            "cache_dir": str(tmp_path / "cache"),
            "model": {"base": str(base), **model},
        },
    )
