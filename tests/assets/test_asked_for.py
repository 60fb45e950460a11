"""Which recipes a process builds: one job's, or all."""

from __future__ import annotations

from pathlib import Path

import pytest

from assets.asked_for import asked_for
from pipeline.recipe import Recipe, recipe_from_mapping

EXECUTE = ["/venv/bin/dagster", "job", "execute", "-m", "assets.definitions"]


@pytest.fixture
def recipes(tmp_path: Path) -> list[Recipe]:
    """Two, of which one's name begins as the other's."""
    return [
        recipe_from_mapping(
            name,
            {
                "datasets": [{"name": "photos", "path": tmp_path}],
                "output_dir": tmp_path / name,
                "model": {"base": "models/none"},
            },
        )
        for name in ("flowers", "flowers_train")
    ]


@pytest.mark.parametrize(
    "options",
    [["-j", "flowers_train"], ["-jflowers_train"], ["--job", "flowers_train"], ["--job=flowers_train"]],
)
def test_a_process_that_runs_one_job_builds_its_recipe_alone(
    recipes: list[Recipe], options: list[str]
) -> None:
    for argv in ([*EXECUTE, *options], [*EXECUTE, *options, "-c", "run.yaml"]):
        assert [each.name for each in asked_for(argv, recipes)] == ["flowers"]


def test_the_longer_name_is_not_taken_for_the_shorter_ones(recipes: list[Recipe]) -> None:
    assert asked_for([*EXECUTE, "-j", "flowers_train_train"], recipes) == recipes[1:]


@pytest.mark.parametrize(
    "argv",
    [
        [*EXECUTE, "-j", "flowers_trian"],
        [*EXECUTE],
        [*EXECUTE, "-j"],
        ["/venv/bin/dagster", "definitions", "validate", "-j", "flowers_train"],
        ["/venv/bin/dagster", "job", "list", "-j", "flowers_train"],
        ["/venv/bin/pytest", *EXECUTE[1:], "-j", "flowers_train"],
        ["/venv/bin/dagster"],
    ],
)
def test_any_other_process_builds_all(recipes: list[Recipe], argv: list[str]) -> None:
    assert asked_for(argv, recipes) == recipes
