"""The schema for editors is up to date, and accepts and rejects the same values as the loader."""

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


def test_the_schema_in_the_repository_is_up_to_date():
    text = schema_path().read_text(encoding="utf-8")
    assert text == schema_text(), "write it again: python -m tools.docs.recipe_schema"


def test_the_schema_is_a_valid_json_schema():
    jsonschema.Draft202012Validator.check_schema(recipe_schema())


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_each_recipe_in_configs_matches_the_schema_and_refers_to_it(file: Path):
    jsonschema.Draft202012Validator(recipe_schema()).validate(data_of(file))
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    marker, _, schema = first.partition("=")
    assert marker == "# yaml-language-server: $schema"
    assert (file.parent / schema).resolve() == schema_path().resolve()


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
    ids=str,
)
def test_the_schema_rejects_values_that_the_loader_rejects(change: dict[str, Any]):
    demo = data_of(project_root() / "configs" / "demo.yaml")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(recipe_schema()).validate({**demo, **change})
