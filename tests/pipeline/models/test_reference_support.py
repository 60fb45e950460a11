from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import RecipeError
from pipeline.models.families import detect
from pipeline.models.recipe_support import require_references
from pipeline.recipe import Recipe, recipe_from_mapping
from tests.pipeline.reference_family import with_references


def recipe_of(base: Path, *numbers: int) -> Recipe:
    """Return a recipe with one dataset per number, which has that many references."""
    datasets: list[dict[str, Any]] = [
        {
            "name": f"d{index}",
            "path": f"/data/{index}",
            "references": [{"path": f"/data/{index}-{each}"} for each in range(number)],
        }
        for index, number in enumerate(numbers)
    ]
    return recipe_from_mapping(
        "x", {"datasets": datasets, "output_dir": "/out", "model": {"base": str(base)}}
    )


def test_references_of_a_family_that_sees_none_are_an_error_that_names_families_that_do(
    tiny_sd: Path,
) -> None:
    require_references(recipe_of(tiny_sd, 0, 0))
    with pytest.raises(RecipeError, match="accepts no reference images, got 1 reference") as excinfo:
        require_references(recipe_of(tiny_sd, 0, 1))
    assert excinfo.value.where.endswith("datasets[1].references")
    assert "FLUX.2" in excinfo.value.fix


def test_each_dataset_may_have_as_many_references_as_the_model_sees(
    tiny_sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_references(monkeypatch, max_number=2)
    require_references(recipe_of(tiny_sd, 0, 1, 2), detect(tiny_sd))
    with pytest.raises(RecipeError, match="accepts at most 2 reference images, got 3") as excinfo:
        require_references(recipe_of(tiny_sd, 3, 2))
    assert excinfo.value.fix == "keep at most 2 of them"


def test_a_model_that_requires_references_needs_them_in_each_dataset(
    tiny_sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_references(monkeypatch, required=True)
    require_references(recipe_of(tiny_sd, 1, 2))
    with pytest.raises(RecipeError, match="requires a reference image for each image, got none") as excinfo:
        require_references(recipe_of(tiny_sd, 1, 0))
    assert excinfo.value.where.endswith("datasets[1].references")


def test_a_base_model_that_is_not_local_is_checked_when_it_is_known(
    tiny_sd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(Path("owner/name"), 1)
    require_references(recipe)
    with pytest.raises(RecipeError, match="accepts no reference images"):
        require_references(recipe, detect(tiny_sd))
