"""Generator of configs/recipe.schema.json, the JSON schema that editors use for completion and validation.

Run `python -m tools.docs.recipe_schema` to write the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.recipe.project import project_root
from pipeline.recipe.schema import RecipeFile
from pipeline.storage.atomic import write_text

SCHEMA_FILE = "recipe.schema.json"


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of a recipe file; it does not contain rules across keys."""
    schema = _without_titles(RecipeFile.model_json_schema(by_alias=True, mode="validation"))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Latentline recipe", **schema}


def schema_text() -> str:
    """Return the text of the file; it depends on the models only."""
    return json.dumps(recipe_schema(), indent=2, ensure_ascii=False) + "\n"


def schema_path() -> Path:
    """Return the path of the schema, next to the project's recipes."""
    return project_root() / "configs" / SCHEMA_FILE


def _without_titles(node: Any) -> Any:
    """Return `node` without the titles that pydantic derives from the keys."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: {name: _without_titles(each) for name, each in value.items()}
        if key in {"properties", "$defs"}
        else _without_titles(value)
        for key, value in node.items()
        if key != "title"
    }


if __name__ == "__main__":
    write_text(schema_path(), schema_text())
