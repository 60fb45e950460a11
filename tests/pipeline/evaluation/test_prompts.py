"""Prompts by role, made from the captions of the dataset or written in the recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import RecipeError
from pipeline.evaluation.prompts import (
    BASE_PROMPTS,
    NO_CONCEPT,
    NUM_CAPTIONS,
    OTHER_SUBJECTS,
    evaluation_prompts,
)
from pipeline.recipe.evaluation import EvaluationSettings

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

Prompts = list[tuple[str, str, str]]


def prompts_of(project: Project, **evaluation: Any) -> Prompts:
    """Return role, concept and text of each prompt."""
    settings = EvaluationSettings.model_validate_json(json.dumps(evaluation))
    recipe = project.recipe.model_copy(update={"evaluation": settings})
    prompts = evaluation_prompts(recipe, RecipeEntries(recipe), project.job().inputs.table)
    return [(each.role, each.concept, each.prompt.caption) for each in prompts]


def texts(prompts: Prompts, role: str, concept: str = "photos") -> list[str]:
    return [text for own_role, own_concept, text in prompts if (own_role, own_concept) == (role, concept)]


def test_concept_prompts_are_captions_of_the_holdout_and_do_not_change_with_the_training_set(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(sizes={"64x64": 12}, datasets={"photos": {"validation_fraction": 0.5}})
    table = project.job().inputs.table
    held_out = {captions[0] for captions in table.filter("held_out")["captions"]}
    assert 0 < len(held_out) < 12
    chosen = texts(prompts_of(project), "concept")
    assert len(chosen) == min(NUM_CAPTIONS, len(held_out))
    assert {*chosen} <= held_out


def test_as_many_captions_of_trained_images_show_whether_these_are_repeated(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(sizes={"64x64": 12}, datasets={"photos": {"validation_fraction": 0.4}})
    table = project.job().inputs.table
    held_out, trained = (
        {captions[0] for captions in table.filter(held_out=each)["captions"]} for each in (True, False)
    )
    prompts = prompts_of(project)
    assert 0 < len(held_out) < len(trained)
    assert len(texts(prompts, "trained")) == len(texts(prompts, "concept")) == len(held_out)
    assert {*texts(prompts, "trained")} <= trained


def test_a_caption_of_all_images_is_a_prompt_once(make_project: Callable[..., Project]) -> None:
    project = make_project(sizes={"64x64": 12}, datasets={"photos": {"validation_fraction": 0.4}})
    one_caption = project.job().inputs.table.with_columns(captions=pl.lit(["a zorp"]))
    recipe = project.recipe.model_copy(update={"evaluation": EvaluationSettings()})
    prompts = evaluation_prompts(recipe, RecipeEntries(recipe), one_caption)
    assert [each.prompt.caption for each in prompts if each.role == "concept"] == ["a zorp"]
    assert not [each for each in prompts if each.role == "trained"]


def test_without_a_holdout_captions_of_trained_images_are_prompts(
    make_project: Callable[..., Project],
) -> None:
    prompts = prompts_of(make_project())
    assert texts(prompts, "trained") == []
    chosen = texts(prompts, "concept")
    assert len(chosen) == NUM_CAPTIONS
    assert all(text.startswith("photograph ") for text in chosen)


def test_a_trigger_word_is_a_prompt_and_names_other_subjects_but_no_base_prompt(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(datasets={"photos": {"captions": {"trigger": "sks", "prefix": "painting of "}}})
    prompts = prompts_of(project)
    assert texts(prompts, "concept", "sks")[-1] == "sks"
    others = texts(prompts, "other", "sks")
    assert others == [f"painting of sks, {subject}" for subject in OTHER_SUBJECTS]
    base = texts(prompts, "base", NO_CONCEPT)
    assert base == list(BASE_PROMPTS)
    assert not any("sks" in text for text in base)


def test_without_trigger_and_prefix_there_are_no_other_subjects(make_project: Callable[..., Project]) -> None:
    assert {role for role, _, _ in prompts_of(make_project())} == {"concept", "base"}


def test_each_concept_has_its_own_prompts_and_priors_have_none(make_project: Callable[..., Project]) -> None:
    datasets = {
        "cats": {"captions": {"trigger": "sks"}},
        "dogs": {"captions": {"trigger": "xyz"}},
        "class": {"role": "prior"},
    }
    prompts = prompts_of(make_project(sizes={"64x64": 9}, datasets=datasets))
    assert {concept for _, concept, _ in prompts} == {"sks", "xyz", NO_CONCEPT}
    for concept in ("sks", "xyz"):
        assert texts(prompts, "concept", concept)[-1] == concept
        assert len(texts(prompts, "other", concept)) == len(OTHER_SUBJECTS)


def test_written_prompts_keep_their_role_and_belong_to_the_concept_whose_trigger_they_name(
    make_project: Callable[..., Project],
) -> None:
    datasets = {
        "cats": {"captions": {"trigger": "sks"}},
        "dogs": {"captions": {"trigger": "xyz", "placeholder": "[dog]"}},
    }
    written = [
        {"prompt": "a [dog] in the snow", "role": "concept"},
        {"prompt": "sks", "role": "other"},
        {"prompt": "a house", "role": "base"},
        {"prompt": "a garden", "role": "concept"},
    ]
    assert prompts_of(make_project(datasets=datasets), prompts=written) == [
        ("concept", "xyz", "a xyz in the snow"),
        ("other", "sks", "sks"),
        ("base", NO_CONCEPT, "a house"),
        ("concept", "sks", "a garden"),
    ]


def test_a_written_prompt_that_does_not_suit_the_base_model_is_an_error_at_its_key(
    make_project: Callable[..., Project],
) -> None:
    written = [{"prompt": "a cat", "role": "base", "height": 33, "width": 64}]
    with pytest.raises(RecipeError) as raised:
        prompts_of(make_project(), prompts=written)
    assert (
        "evaluation.prompts[0].height" in raised.value.where or "must be multiples of 8" in raised.value.what
    )
