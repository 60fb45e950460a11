"""Variants: plain recipes with other values, the same for a seed whatever their number."""

from __future__ import annotations

from math import log10
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import RecipeError
from pipeline.recipe import Recipe
from pipeline.sweep.variants import variant_values, variants
from tests.small_recipe import small_recipe


def swept(tmp_path: Path, sweep: dict[str, Any] | None, **training: Any) -> Recipe:
    datasets = [{"name": "photos", "path": tmp_path / "data", "validation_fraction": 0.2}]
    return small_recipe(tmp_path, datasets=datasets, sweep=sweep, training=training)


def drawn(tmp_path: Path, count: int, **more: Any) -> list[dict[str, Any]]:
    ranges = {"training.learning_rate": [1e-5, 1e-3], "text.caption_dropout": [0.0, 0.5]}
    ranges |= {"training.warmup_steps": [0, 3]}
    random = {"count": count, "ranges": ranges, "choices": {"training.lora.rank": [4, 8]}, **more}
    recipe = swept(tmp_path, {"random": random, "max_variants": 1000})
    assert recipe.sweep is not None
    return variant_values(recipe.sweep)


def test_a_variant_is_the_recipe_with_its_values_and_without_the_sweep(tmp_path: Path) -> None:
    grid = {"training.learning_rate": [1e-4, 3e-4], "datasets.photos.repeats": [1, 3]}
    recipe = swept(tmp_path, {"grid": grid, "seeds": 2}, seed=7, epochs=3)
    found = variants(recipe)
    assert [variant.number for variant in found] == [1, 2, 3, 4]
    assert [tuple(variant.overrides.values()) for variant in found] == [
        (1e-4, 1),
        (1e-4, 3),
        (3e-4, 1),
        (3e-4, 3),
    ]
    assert found[1].text == "variant 2 (learning_rate 0.0001, datasets.photos.repeats 3)"
    last, with_other_seed = found[3].recipes
    plain = swept(tmp_path, None, seed=7, epochs=3, learning_rate=3e-4)
    assert last.training == plain.training
    assert last.datasets[0].repeats == 3
    assert (last.sweep, last.output_dir, last.source) == (None, plain.output_dir, plain.source)
    assert with_other_seed.training == plain.training.model_copy(update={"seed": 8})


def test_a_section_may_vary_and_steps_replace_epochs(tmp_path: Path) -> None:
    grid = {"training.lora": [{"rank": 4, "alpha": 4.0}, {"rank": 8, "alpha": 8.0}], "training.steps": [10]}
    found = variants(swept(tmp_path, {"grid": grid}, epochs=3))
    assert [each.recipes[0].training.lora.rank for each in found] == [4, 8]
    assert found[0].recipes[0].training.epochs is None


def test_an_invalid_variant_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as raised:
        variants(swept(tmp_path, {"grid": {"training.lora.rank": [4, -1]}}))
    assert "variant 2 of the sweep of flowers.yaml (lora.rank -1), training.lora.rank" in raised.value.where


def test_random_values_are_reproducible_in_range_and_stay_if_the_count_grows(tmp_path: Path) -> None:
    values = drawn(tmp_path, 400)
    assert drawn(tmp_path, 5) == values[:5]
    assert drawn(tmp_path, 5, seed=1) != values[:5]
    rates = [each["training.learning_rate"] for each in values]
    assert all(1e-5 <= rate <= 1e-3 and float(f"{rate:.3g}") == rate for rate in rates)
    # Log-uniform: half of 400 rates are below the geometric mean, give or take 5 standard deviations of 10.
    assert 150 < sum(log10(rate) < -4 for rate in rates) < 250
    assert 150 < sum(each["text.caption_dropout"] < 0.25 for each in values) < 250
    assert {each["training.warmup_steps"] for each in values} == {0, 1, 2, 3}
    assert {each["training.lora.rank"] for each in values} == {4, 8}
