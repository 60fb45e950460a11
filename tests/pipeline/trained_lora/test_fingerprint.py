from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.cache.requests import RecipeEntries
from pipeline.trained_lora.fingerprint import describe_difference, run_facts, run_id, say_what_differs
from pipeline.trained_lora.samples import training_inputs

if TYPE_CHECKING:
    from conftest import Project


def id_of(project: Project) -> str:
    entries = RecipeEntries(project.recipe)
    inputs = training_inputs(project.recipe, entries, project.latents, project.text)
    return run_id(run_facts(project.recipe, entries, inputs))


@pytest.mark.parametrize(
    "update",
    [
        {"seed": 8},
        {"batch_size": 3},
        {"gradient_accumulation": 1},
        {"learning_rate": 1e-3},
        {"max_grad_norm": 2.0},
        {"warmup_steps": 1},
        {"lr_scheduler": "linear"},
        {"num_processes": 2},
    ],
)
def test_each_setting_that_decides_the_weights_is_in_the_id(
    make_project: Callable[..., Project], update: dict[str, Any]
) -> None:
    project = make_project()
    assert id_of(project.changed("other", **update)) != id_of(project)


@pytest.mark.parametrize("update", [{"checkpoint_every": 9}, {"sample_every": 9}, {"steps": 50}, {}])
def test_nothing_else_is_in_the_id(make_project: Callable[..., Project], update: dict[str, Any]) -> None:
    project = make_project()
    assert id_of(project.changed("elsewhere", **update)) == id_of(project)


def test_the_steps_are_in_the_id_of_a_schedule_that_depends_on_them(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(lr_scheduler="cosine")
    assert id_of(project.changed("other", steps=7)) != id_of(project)


def test_a_sample_more_is_another_run(make_project: Callable[..., Project]) -> None:
    project = make_project()
    before = id_of(project)
    project.latents = project.latents.head(7)
    assert id_of(project) != before


def test_a_difference_names_each_fact_with_both_values() -> None:
    before = {"plan": {"seed": 1, "batch_size": 2}, "samples": {"latents": "a" * 64}}
    after = {"plan": {"seed": 3, "batch_size": 2}, "samples": {"latents": "b" * 64}}
    assert describe_difference(before, after) == [
        "plan.seed 1 -> 3",
        "samples.latents aaaaaaaa... -> bbbbbbbb...",
    ]


def test_of_a_first_run_nothing_is_said(tmp_path: Any) -> None:
    say_what_differs(tmp_path, "run", {}, pytest.fail)
