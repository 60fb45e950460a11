"""Recipes that components of a Dagster project name, which may be outside of the folder of recipes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import RecipeError

COMPONENTS = ("latentline.LoraRecipe", "latentline.component.LoraRecipe")
"""Types of a component in `defs.yaml` that has a recipe."""

# Where `create-dagster project` writes definitions. The whole project may contain datasets.
_DEFINITIONS = ("src/*/defs/**/defs.yaml", "*/defs/**/defs.yaml")
_PROJECT_ROOT = "{{ context.project_root }}"


def component_recipe_files(root: Path) -> list[Path]:
    """Return the recipe files of all components `latentline.LoraRecipe` in the project folder `root`.

    Raises:
        RecipeError: A `defs.yaml` cannot be read, or its path of a recipe is another template.
    """
    files = {file for pattern in _DEFINITIONS for file in root.glob(pattern)}
    return [recipe for file in sorted(files) for recipe in _recipes_of(file, root)]


def _recipes_of(file: Path, root: Path) -> Iterator[Path]:
    try:
        documents: list[Any] = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeError, yaml.YAMLError) as err:
        what = f"a file of components cannot be read: {' '.join(str(err).split())}"
        raise RecipeError(
            what, where=str(file), fix="correct the file: dg check yaml names the line"
        ) from err

    for document in documents:
        if not isinstance(document, dict) or document.get("type") not in COMPONENTS:
            continue
        written = str((document.get("attributes") or {}).get("recipe", ""))
        path = written.replace(_PROJECT_ROOT, str(root))
        if not path or "{{" in path:
            what = f"attributes.recipe must be a path, got {written!r}"
            fix = f"write a path relative to the folder of this file, or one that begins with {_PROJECT_ROOT}"
            raise RecipeError(what, where=str(file), fix=fix)
        yield (file.parent / path).resolve()
