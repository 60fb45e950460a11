"""The section `evaluation`: defaults, short forms, and mistakes with their place and fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import RecipeError
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipe.evaluation import EvaluationSettings, ScorerSettings
from tests.pipeline.recipe.mistakes import assert_mistake, each_case
from tests.small_recipe import small_recipe

ROSE = {"prompt": "a rose", "role": "concept"}


def test_a_recipe_without_the_section_has_none_and_its_defaults_are_the_documented_ones(
    tmp_path: Path,
) -> None:
    assert small_recipe(tmp_path).evaluation is None
    settings = small_recipe(tmp_path, evaluation={}).evaluation
    assert settings == EvaluationSettings()
    assert (settings.prompts, settings.pictures, settings.steps, settings.strengths) == ((), 4, "all", (1.0,))
    assert [each.name for each in settings.scorers] == ["dino", "clip"]
    assert (settings.limits.drift, settings.limits.copies) == (0.15, 0.1)


def test_a_scorer_s_name_is_a_section_with_only_a_name() -> None:
    values = {"scorers": ["clip", "demo.score:WorldScorer", {"name": "dino", "weights": "models/dino"}]}
    scorers = EvaluationSettings.model_validate_json(json.dumps(values)).scorers
    assert scorers == (
        ScorerSettings(name="clip"),
        ScorerSettings(name="demo.score:WorldScorer"),
        ScorerSettings(name="dino", weights="models/dino"),
    )
    assert [each.is_import_path for each in scorers] == [False, True, False]


@pytest.mark.parametrize(
    "values",
    [
        {"prompts": "auto", "steps": "last"},
        {"prompts": [ROSE, {**ROSE, "steps": 3, "role": "base"}], "steps": [2, 4], "strengths": [0.5, 1]},
    ],
)
def test_a_recipe_with_the_section_survives_a_round_trip(tmp_path: Path, values: dict[str, Any]) -> None:
    recipe = small_recipe(tmp_path, evaluation=values)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_references_of_prompts_are_relative_to_the_project(tmp_path: Path) -> None:
    prompts = [{**ROSE, "references": ["data/before.png"]}]
    (prompt,) = small_recipe(tmp_path, evaluation={"prompts": prompts}).evaluation.prompts
    assert prompt.references[0].is_absolute()


@each_case(
    [
        (
            {"prompts": []},
            "evaluation.prompts",
            "must be auto or a list of prompts, got an empty list",
            "use auto",
        ),
        ({"prompts": "a rose"}, "evaluation.prompts", "must be auto or a list", "role: concept"),
        ({"prompts": ["a rose"]}, "evaluation.prompts[0]", "must have a role, got 'a rose'", "role: concept"),
        ({"prompts": [{"prompt": "a rose"}]}, "evaluation.prompts[0].role", "role is missing", "add role"),
        (
            {"prompts": [{**ROSE, "role": "style"}]},
            "evaluation.prompts[0].role",
            "concept, trained, other or base",
            "use",
        ),
        (
            {"prompts": [{**ROSE, "seed": 3}]},
            "evaluation.prompts[0].seed",
            "unknown key seed",
            "training.seed",
        ),
        (
            {"steps": "first"},
            "evaluation.steps",
            "must be all, last or a list of steps above 0, got first",
            "[500",
        ),
        ({"steps": [0]}, "evaluation.steps", "must be all, last or a list", "use all"),
        ({"steps": []}, "evaluation.steps", "must be all, last or a list", "use all"),
        ({"pictures": 0}, "evaluation.pictures", "between 1 and 64, got 0", "between 1 and 64"),
        ({"strengths": [0.0]}, "evaluation.strengths[0]", "must be greater than 0", "greater than 0"),
        ({"strengths": [1.0, 1.0]}, "evaluation.strengths", "must be unique, got 1.0, 1.0", "remove"),
        ({"prompts": [ROSE, {**ROSE, "steps": 3}]}, "evaluation.prompts[1]", "'a rose' twice", "remove one"),
        ({"scorers": ["dyno"]}, "evaluation.scorers[0].name", 'got "dyno"', "did you mean dino?"),
        ({"scorers": ["demo.score.World"]}, "evaluation.scorers[0].name", "an import path", "module:Class"),
        (
            {"scorers": ["clip", "clip"]},
            "evaluation.scorers[1]",
            "must be unique, got clip twice",
            "remove one",
        ),
        (
            {"scorers": [{"name": "a.b:C", "revision": "main"}]},
            "evaluation.scorers[0].revision",
            "revision requires dino, clip or siglip",
            "remove revision",
        ),
        ({"limits": {"drift": -1}}, "evaluation.limits.drift", "between 0 and 2, got -1", "between 0 and 2"),
        ({"judge": "best"}, "evaluation.judge", "unknown key judge", "remove it"),
        ({"publish": "first"}, "evaluation.publish", "must be last or best", "last or best"),
    ]
)
def test_each_mistake_names_key_value_and_fix(values: dict[str, Any], key: str, what: str, fix: str) -> None:
    assert_mistake({"evaluation": values}, key, what, fix)


@pytest.mark.parametrize("scorer", ["demo.score:WorldScorer", {"name": "demo.score:WorldScorer"}])
def test_import_paths_of_strangers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scorer: object
) -> None:
    file = tmp_path / "small.yaml"
    text = "datasets:\n  - {name: photos, path: data/photos}\noutput_dir: outputs/small\nmodel: {base: a/b}\n"
    file.write_text(
        f"{text}evaluation: {{scorers: [clip, {scorer!r}]}}\n".replace("'", '"'), encoding="utf-8"
    )
    monkeypatch.setenv("LATENTLINE_UNTRUSTED", "0")
    assert load_recipe(file).evaluation is not None

    monkeypatch.setenv("LATENTLINE_UNTRUSTED", "1")
    with pytest.raises(RecipeError) as raised:
        load_recipe(file)
    assert "must be dino, clip or siglip, got the import path demo.score:WorldScorer" in str(raised.value)


def test_weights_of_strangers_must_be_inside_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "small.yaml"
    text = "datasets:\n  - {name: photos, path: data/photos}\noutput_dir: outputs/small\nmodel: {base: a/b}\n"
    file.write_text(f"{text}evaluation: {{scorers: [{{name: clip, weights: /etc}}]}}\n", encoding="utf-8")
    monkeypatch.setenv("LATENTLINE_UNTRUSTED", "1")
    with pytest.raises(
        RecipeError, match=r"evaluation.scorers\[0\].weights must be a path inside the project"
    ):
        load_recipe(file)
