"""The schema for editors is the models', and takes what the loader takes."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pipeline.recipe import project_root
from pipeline.recipe.yaml_document import parse
from tools.docs.recipe_schema import recipe_schema, schema_path, schema_text

CONFIGS = project_root() / "configs"
RECIPES = sorted([*CONFIGS.glob("*.yaml"), *(CONFIGS / "examples").glob("*.yaml")])


def data_of(file: Path) -> dict[str, Any]:
    return parse(file.read_text(encoding="utf-8")).data


def test_the_schema_in_the_repository_is_fresh():
    text = schema_path().read_text(encoding="utf-8")
    assert text == schema_text(), "write it anew: python -m tools.docs.recipe_schema"


def test_the_schema_is_itself_valid():
    jsonschema.Draft202012Validator.check_schema(recipe_schema())


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_each_recipe_in_configs_fits_the_schema_and_names_it(file: Path):
    jsonschema.Draft202012Validator(recipe_schema()).validate(data_of(file))
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    mark, _, named = first.partition("=")
    assert mark == "# yaml-language-server: $schema"
    assert (file.parent / named).resolve() == schema_path().resolve()


@pytest.mark.parametrize(
    "change",
    [
        {"stepps": 3},
        {"training": {"steps": "eight"}},
        {"recache": {"enabled": "False"}},
        {"checks": {"allow": ["path_isolation"]}},
        {"name": "demo"},
        {"datasets": []},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(change: dict[str, Any]):
    demo = data_of(project_root() / "configs" / "demo.yaml")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(recipe_schema()).validate({**demo, **change})
