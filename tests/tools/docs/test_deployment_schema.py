"""The schema for editors of deployment files is up to date, and accepts the same values as the loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pipeline.recipe import project_root
from pipeline.recipe.yaml_document import parse
from tools.docs.deployment_schema import schema_path, schema_text

EXAMPLES = [project_root() / "deploy" / f"{kind}.yaml" for kind in ("local", "slurm", "kubernetes", "ray")]
SCHEMA = json.loads(schema_text())


def data_of(file: Path) -> dict[str, Any]:
    return parse(file.read_text(encoding="utf-8")).data


def test_the_schema_in_the_repository_is_up_to_date() -> None:
    text = schema_path().read_text(encoding="utf-8")
    assert text == schema_text(), "write it again: python -m tools.docs.deployment_schema"


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_each_example_matches_the_schema_and_refers_to_it(file: Path) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(data_of(file))
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    marker, _, schema = first.partition("=")
    assert marker == "# yaml-language-server: $schema"
    assert (file.parent / schema).resolve() == schema_path().resolve()


@pytest.mark.parametrize(
    "data",
    [
        {"executor": "multi"},
        {"executor": {"config": {}}},
        {"launcher": {"kind": "pbs"}},
        {"launcher": {"kind": "local", "workers": 2}},
        {"launcher": {"kind": "slurm", "workers": 0}},
        {"launcher": {"kind": "kubernetes"}},
        {"launcher": {"kind": "ray", "num_cpus": 0}},
        {"pools": "gpu"},
        {"steps": 4},
    ],
    ids=str,
)
def test_the_schema_rejects_values_that_the_loader_rejects(data: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(data)
