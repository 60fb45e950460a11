import json
import re
from typing import Any

import pytest

from pipeline.errors import RecipeError
from pipeline.recipe import Recipe, recipe_from_mapping


def recipe(**training: Any) -> Recipe:
    values = {"datasets": [{"name": "d", "path": "d"}], "output_dir": "out", "model": {"base": "a/b"}}
    return recipe_from_mapping("small", values | {"training": training})


@pytest.mark.parametrize(
    "training",
    [
        {"optimizer": "prodigy", "optimizer_arguments": {"d_coef": 0.5, "betas": [0.9, 0.99]}},
        {"optimizer": "adafactor", "optimizer_arguments": {"eps": [None, 1e-4]}},
        {"optimizer": "adafactor", "optimizer_arguments": {"eps": [1e-30, 1e-4]}},
        {"optimizer": "torch.optim.NAdam", "optimizer_arguments": {"anything": "checked in training"}},
        {"optimizer": "schedule_free", "warmup_steps": 10},
        {"lr_scheduler": "wsd", "decay_steps": 100},
        {"lr_scheduler": "cosine_with_restarts", "lr_cycles": 3},
        {"lr_scheduler": "polynomial", "lr_power": 2.0},
        {"ema_decay": 0.99},
        {"epochs": 3, "warmup_steps": 5000},
    ],
    ids=str,
)
def test_a_valid_combination_is_accepted(training: dict[str, Any]) -> None:
    valid_recipe = recipe(**training)
    assert Recipe.model_validate_json(valid_recipe.model_dump_json()) == valid_recipe


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"optimizer": "adamv"}, "did you mean adamw?"),
        ({"optimizer_arguments": {"weigth_decay": 0.1}}, "did you mean weight_decay?"),
        ({"optimizer_arguments": {"lr": 0.1}}, "set training.learning_rate"),
        ({"optimizer": "torch.optim.SGD", "optimizer_arguments": {"lr": 0.1}}, "set training.learning_rate"),
        ({"optimizer_arguments": {"betas": [None, 0.9]}}, "write betas: [0.9, 0.999]"),
        ({"optimizer_arguments": {"eps": "1e-8"}}, "write eps: 1.0e-8"),
        ({"optimizer_arguments": {"weight_decay": [0.1]}}, "weight_decay must be a number, got [0.1]"),
        ({"optimizer_arguments": {"amsgrad": 1}}, "amsgrad must be true or false, got 1"),
        (
            {"optimizer": "prodigy", "optimizer_arguments": {"beta3": "x"}},
            "beta3 must be a number or null, got",
        ),
        ({"optimizer_arguments": {"betas": 0.9}}, "betas must be a list of 2 numbers, got 0.9"),
        (
            {"optimizer": "adafactor", "optimizer_arguments": {"eps": [1e-30, None]}},
            "a list of 2 numbers, and the first may be null, got [1e-30, null]",
        ),
        (
            {"optimizer": "adafactor", "optimizer_arguments": {"eps": [None, 1e-3, 1.0]}},
            "eps: [null, 0.001]",
        ),
        ({"optimizer": "schedule_free", "lr_scheduler": "cosine"}, "set lr_scheduler: constant"),
        ({"lr_scheduler": "wsd"}, "needs decay_steps"),
        ({"lr_scheduler": "wsd", "decay_steps": 990, "warmup_steps": 20}, "use at most 980"),
        ({"decay_steps": 5}, "set lr_scheduler: wsd"),
        ({"lr_scheduler": "rising", "warmup_steps": 5}, "remove it"),
        ({"lr_cycles": 2, "lr_scheduler": "cosine"}, "set lr_scheduler: cosine_with_restarts"),
        ({"lr_power": 2.0}, "set lr_scheduler: polynomial"),
        ({"lr_scheduler": "polynomial", "learning_rate": 1e-8}, "raise it"),
        ({"ema_decay": 1.0}, "less than 1"),
        ({"steps": 5, "epochs": 2}, "remove one of the two"),
        ({"exhausted": "repeat"}, "give each dataset a weight"),
    ],
    ids=str,
)
def test_a_contradiction_is_a_mistake_with_a_fix(training: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        recipe(**training)


@pytest.mark.parametrize("value", [[None, "x"], {"a": 1}, [True, 0.9], [[0.9], 0.9]], ids=str)
def test_an_argument_of_another_type_is_one_mistake(value: Any) -> None:
    with pytest.raises(RecipeError) as excinfo:
        recipe(optimizer="adafactor", optimizer_arguments={"eps": value})
    assert excinfo.value.what.startswith("the argument must be a number, true, false, text, null or a list")
    assert "training.optimizer_arguments.eps" in excinfo.value.where
    assert json.dumps(value) in excinfo.value.what
