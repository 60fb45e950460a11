"""Mistakes in a recipe, from a few keys added to the smallest valid one."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.recipe.errors import Mistake, find_mistakes
from pipeline.recipe.yaml_document import dotted

SMALLEST: dict[str, Any] = {
    "datasets": [{"name": "photos", "path": "data/photos"}],
    "output_dir": "outputs/x",
    "model": {"base": "owner/name"},
}


def dataset(**values: Any) -> dict[str, Any]:
    return {"datasets": [{"name": "photos", "path": "data/photos", **values}]}


def mistakes_of(**values: Any) -> list[Mistake]:
    return find_mistakes({**SMALLEST, **values})


def assert_mistake(values: dict[str, Any], key: str, what: str, fix: str) -> None:
    """Assert that `values` have one mistake, at `key`, whose texts contain `what` and `fix`."""
    (mistake,) = mistakes_of(**values)
    assert dotted(mistake.path) == key
    assert what in mistake.what
    assert fix in mistake.fix


Case = tuple[dict[str, Any], str, str, str]
"""The arguments of `assert_mistake`."""


def each_case(cases: list[Case]) -> pytest.MarkDecorator:
    """Run a test for each case, named by its key and the start of the message."""
    ids = [f"{case[1]}-{case[2][:20]}" for case in cases]
    return pytest.mark.parametrize(("values", "key", "what", "fix"), cases, ids=ids)
