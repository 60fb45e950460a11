from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.cache.requests import RecipeEntries
from pipeline.trained_lora.fingerprint import describe_difference, log_differences, run_facts, run_id
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
def test_every_setting_that_decides_the_weights_changes_the_run_id(
    make_project: Callable[..., Project], update: dict[str, Any]
) -> None:
    project = make_project()
    assert id_of(project.changed("other", **update)) != id_of(project)


@pytest.mark.parametrize("update", [{"checkpoint_every": 9}, {"sample_every": 9}, {"steps": 50}, {}])
def test_other_settings_do_not_change_the_run_id(
    make_project: Callable[..., Project], update: dict[str, Any]
) -> None:
    project = make_project()
    assert id_of(project.changed("other", **update)) == id_of(project)


def test_the_number_of_steps_changes_the_run_id_if_the_schedule_depends_on_it(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(lr_scheduler="cosine")
    assert id_of(project.changed("other", steps=7)) != id_of(project)


def test_removing_a_sample_changes_the_run_id(make_project: Callable[..., Project]) -> None:
    project = make_project()
    before = id_of(project)
    project.latents = project.latents.head(7)
    assert id_of(project) != before


def test_a_difference_lists_each_changed_fact_with_both_values() -> None:
    before = {"plan": {"seed": 1, "batch_size": 2}, "samples": {"latents": "a" * 64}}
    after = {"plan": {"seed": 3, "batch_size": 2}, "samples": {"latents": "b" * 64}}
    assert describe_difference(before, after) == [
        "plan.seed 1 -> 3",
        "samples.latents aaaaaaaa... -> bbbbbbbb...",
    ]


def test_a_first_run_logs_no_differences(tmp_path: Any) -> None:
    log_differences(tmp_path, "run", {}, log=pytest.fail)
