"""Pictures of an evaluation: equal to those of `latentline sample`, drawn once, and keyed by their inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.evaluation.pictures import picture_spec, picture_table
from pipeline.evaluation.prepare import Request
from pipeline.evaluation.stage import evaluate
from pipeline.processes.launch import cpu_threads
from pipeline.storage.tables import Tables
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.evaluation.evaluated import evaluated_recipe, pixels_of, prepared
from tests.pipeline.trained_lora.pictures.drawings import drawn, pixels

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from tests.pipeline.trained_lora.project import Project


def drawn_by(recipe: Recipe, log: list[str] | None = None, **request: Any) -> InProcessLaunch:
    """Evaluate, and return the launcher, whose `modules` are the launched ones."""
    launch = InProcessLaunch()
    lines = log if log is not None else []
    evaluate(recipe, Request(**request), Tables(recipe.output_dir), launch=launch, log=lines.append)
    return launch


def test_pictures_equal_those_of_sample_bit_for_bit_and_the_base_model_s_have_no_lora(
    trained: Project,
) -> None:
    recipe = evaluated_recipe(trained, pictures=2, strengths=[0.5, 1.0])
    drawn_by(recipe)
    by_evaluation = pixels_of(prepared(recipe))
    assert len(by_evaluation) == 2 * 2 * (1 + 2 * 2)

    prompts = tuple(each.as_preview().model_copy(update={"seed": 1}) for each in recipe.evaluation.prompts)
    sampled = trained.changed("output", sample_prompts=prompts)
    # As the launched process of either command; another number of threads changes the last bits.
    torch.set_num_threads(cpu_threads())
    try:
        job = drawn(sampled, steps=(2, 4), strengths=(0.0, 0.5, 1.0))
    finally:
        torch.set_num_threads(1)
    for cell in job.cells():
        step = cell.lora.step if cell.strength else 0
        own = by_evaluation[step, cell.strength, job.prompts[cell.number].caption, 1]
        assert np.array_equal(own, pixels(cell.path)), (step, cell.strength, cell.number)
    different = {own.tobytes() for own in by_evaluation.values()}
    assert len(different) == len(by_evaluation), "each step, strength, prompt and seed has its own picture"


def test_a_second_evaluation_launches_nothing_and_one_more_step_draws_only_that_step(
    trained: Project,
) -> None:
    recipe, log = evaluated_recipe(trained), list[str]()
    first = drawn_by(recipe, steps=(2,))
    assert first.modules[0] == "pipeline.evaluation.worker"
    assert "4/4 pictures drawn" in first.lines

    assert drawn_by(recipe, log, steps=(2,)).modules == []
    assert any("4 pictures needed: 4 present, 0 missing" in line for line in log)
    assert "2/2 pictures drawn" in drawn_by(recipe).lines
    assert drawn_by(recipe).modules == []


def test_a_damaged_and_a_missing_picture_are_drawn_again_with_the_same_bytes(trained: Project) -> None:
    recipe = evaluated_recipe(trained)
    drawn_by(recipe)
    before = pixels_of(prepared(recipe))
    evaluation = prepared(recipe)
    rows = picture_table(evaluation).to_dicts()
    damaged, missing = (evaluation.entries.store.path(picture_spec(row)) for row in rows[2:4])
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    missing.unlink()
    assert "2/2 pictures drawn" in drawn_by(recipe).lines
    after = pixels_of(prepared(recipe))
    assert all(np.array_equal(before[each], after[each]) for each in before)


def test_the_key_has_everything_that_decides_a_picture_and_not_what_does_not(trained: Project) -> None:
    def keys(step: int = 4, **values: Any) -> list[str]:
        table = picture_table(prepared(evaluated_recipe(trained, **values), steps=(step,)))
        return table.sort("step", "number")["key"].to_list()

    usual = keys()
    assert len(set(usual)) == 4
    assert keys(scorers=["clip"], limits={"drift": 1.0}) == usual
    base, own = usual[:2], usual[2:]
    assert keys(2)[:2] == base, "the base model's pictures belong to no step"
    assert not {*keys(2)[2:]} & {*own}
    assert keys(strengths=[0.5])[:2] == base
    assert not {*keys(strengths=[0.5])[2:]} & {*own}

    (rose, _) = evaluated_recipe(trained).evaluation.prompts
    for change in ({"prompt": "a cat"}, {"steps": 3}, {"guidance_scale": 2.0}, {"negative_prompt": "x"}):
        changed = {**rose.model_dump(exclude_none=True, exclude={"references"}), **change}
        assert not {*keys(prompts=[changed])} & {*usual}, change
    renamed = trained.recipe.model_copy(update={"name": "other"})
    same = picture_table(
        prepared(renamed.model_copy(update={"evaluation": evaluated_recipe(trained).evaluation}))
    )
    assert {*usual} < {*same["key"]}


def test_steps_of_the_recipe_are_all_the_last_or_some(trained: Project) -> None:
    def steps(**values: Any) -> list[int]:
        return prepared(evaluated_recipe(trained, **values)).steps

    assert (steps(), steps(steps="last"), steps(steps=[2])) == ([2, 4], [4], [2])
    assert prepared(evaluated_recipe(trained, steps=[2]), steps="all").steps == [2, 4]
