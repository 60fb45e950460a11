"""The section `sweep`: which keys may vary, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import RecipeError
from pipeline.recipe import Recipe
from pipeline.recipe.untrusted import untrusted_mistakes
from tests.small_recipe import small_recipe

RATES = {"training.learning_rate": [1e-4, 3e-4]}


def swept(tmp_path: Path, sweep: dict[str, Any], **sections: Any) -> Recipe:
    datasets = [{"name": "photos", "path": tmp_path / "data", "validation_fraction": 0.2}]
    return small_recipe(tmp_path, **{"datasets": datasets, "sweep": sweep, **sections})


def test_a_recipe_with_the_section_round_trips_and_its_numbers_of_variants_are_counted(
    tmp_path: Path,
) -> None:
    grid = {**RATES, "training.lora.rank": [4, 8, 16], "datasets.photos.repeats": [1, 2]}
    recipe = swept(tmp_path, {"grid": grid})
    assert recipe.sweep is not None
    assert (recipe.sweep.num_variants, recipe.sweep.keys) == (12, tuple(grid))
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert hash(recipe) == hash(swept(tmp_path, {"grid": grid})), "the definitions cache by recipe"
    assert recipe.optional_assets == ("sweep",)

    drawn = {"count": 5, "ranges": {"training.learning_rate": [1e-5, 1e-3]}}
    random = swept(tmp_path, {"random": drawn, "seeds": 2}).sweep
    assert random is not None
    assert random.num_variants == 5


@pytest.mark.parametrize(
    ("sweep", "what", "fix"),
    [
        ({}, "sweep must have either grid or random", "write grid"),
        ({"grid": RATES, "random": {"count": 2, "choices": RATES}}, "got both", "write grid"),
        ({"grid": {"training.learning_rte": [1, 2]}}, "unknown key training.learning_rte", "did you mean"),
        ({"grid": {"output_dir": ["a", "b"]}}, "a sweep cannot vary output_dir", "remove it"),
        ({"grid": {"evaluation.pictures": [1, 2]}}, "cannot vary evaluation.pictures", "remove it"),
        ({"grid": {"accelerate.num_processes": [1, 2]}}, "cannot vary accelerate.num", "remove it"),
        ({"grid": {"datasets.photos.path": ["a", "b"]}}, "cannot vary datasets.photos.path", "remove it"),
        ({"grid": {"datasets.fotos.weight": [1, 2]}}, "must name it", "datasets.photos.weight"),
        ({"grid": {"training.seed": []}}, "without repetitions, got []", "write a list"),
        ({"grid": {"training.seed": [1, 1]}}, "without repetitions, got [1, 1]", "write a list"),
        ({"grid": {"training.seed": list(range(65))}}, "65 variants, and max_variants is 64", "random"),
        ({"random": {"count": 2}}, "random must have ranges or choices", "add a key"),
        (
            {"random": {"count": 2, "ranges": {"training.learning_rate": [1e-3, 1e-5]}}},
            "two ascending numbers",
            "the lowest and the highest",
        ),
        (
            {"random": {"count": 2, "ranges": {"training.learning_rate": [0.0, 1e-3]}}},
            "the range of training.learning_rate must be above 0",
            "above 0",
        ),
        ({"grid": RATES, "budget": {}}, "budget must have either steps or minutes", "{steps: 4000}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "section",
)
def test_a_mistake_in_the_section_is_an_error_with_its_fix(
    tmp_path: Path, sweep: dict[str, Any], what: str, fix: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        swept(tmp_path, sweep)
    assert what in raised.value.what
    assert fix in raised.value.fix


def test_a_sweep_needs_held_out_images_and_for_the_validation_loss_its_measurement(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no dataset has a validation_fraction"):
        small_recipe(tmp_path, sweep={"grid": RATES})
    with pytest.raises(RecipeError, match=r"requires training.validate_every above 0, got 0"):
        swept(tmp_path, {"grid": RATES, "judge": "validation_loss"}, training={"validate_every": 0})


def test_a_sweep_with_its_outputs_at_an_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="sweep requires a local output_dir, got s3://bucket/flowers"):
        swept(tmp_path, {"grid": RATES}, output_dir="s3://bucket/flowers")


def test_a_strangers_sweep_varies_nothing_that_runs_code_or_reads_a_path(tmp_path: Path) -> None:
    sweep = {
        "grid": {"training.optimizer": ["adamw", "my.Optimizer"], "datasets.photos.repeats": [1, 2]},
        "random": {"count": 2, "choices": {"model.base": ["a", "b"]}},
    }
    mistakes = untrusted_mistakes({"sweep": sweep}, tmp_path, cache_dir=".cache/latentline")
    assert [mistake.what.split(",")[0] for mistake in mistakes] == [
        "sweep.grid must not vary training.optimizer",
        "sweep.random.choices must not vary model.base",
    ]
