"""The kinds of YAML files that are validated strictly: recipes, and the deployment file (deployment.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel

from pipeline.recipe.other_trainers import term_of
from pipeline.recipe.schema import RecipeFile
from pipeline.recipe.yaml_document import KeyPath


@dataclass(frozen=True)
class FileKind:
    """A kind of YAML file.

    Attributes:
        name: Name in messages, such as `recipe`.
        model: Pydantic model of the file.
        first_key: Key that most files start with.
        example: Files to start from.
        schema: Path of the JSON schema in the project, which has the descriptions of all keys.
        unknown_key_fix: Function that returns a special fix for an unknown key, or None.
    """

    name: str
    model: type[BaseModel]
    first_key: str
    example: str
    schema: str
    unknown_key_fix: Callable[[KeyPath], str | None]


def _recipe_key_fix(path: KeyPath) -> str | None:
    if (term := term_of(str(path[-1]))) is not None:
        return term.fix
    if path == ("name",):
        return "remove it: the name of a recipe is the name of its file without .yaml"
    return None


RECIPE = FileKind(
    name="recipe",
    model=RecipeFile,
    first_key="datasets",
    example="a recipe in configs/, such as demo.yaml",
    schema="configs/recipe.schema.json",
    unknown_key_fix=_recipe_key_fix,
)
