"""Maintenance knows the entries of an evaluation: gc, verify, explain and plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.encoding.speed import record_speed
from pipeline.evaluation.known_entries import read_known
from pipeline.evaluation.prepare import Request
from pipeline.evaluation.prompts import BASE_PROMPTS, NUM_CAPTIONS
from pipeline.evaluation.stage import evaluate
from pipeline.maintenance import gc, verify
from pipeline.maintenance.explain import explain
from pipeline.maintenance.picture_forecast import forecast_pictures
from pipeline.reporting.reports import write_report
from pipeline.storage.tables import Tables
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.evaluation.evaluated import SCORER, evaluated_recipe, pixels_of, prepared

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from tests.pipeline.trained_lora.project import Project

KINDS = {"pictures", "features"}


@pytest.fixture
def recipe(trained: Project) -> Recipe:
    """The recipe of a project that was evaluated."""
    recipe = evaluated_recipe(trained)
    tables = Tables(recipe.output_dir)
    result = evaluate(recipe, Request(), tables, launch=InProcessLaunch(), log=lambda _: None)
    write_report(recipe.output_dir, "evaluation", result.report)
    return recipe


def test_gc_keeps_the_entries_of_the_last_evaluation_and_no_others(recipe: Recipe) -> None:
    keys = {key for group in gc.needed_keys(recipe, log=lambda _: None) for key in group}
    own = set(read_known(recipe.output_dir)["key"])
    assert len(own) == 24
    assert own <= keys

    only_these = gc.survey(
        recipe.cache_dir, keep_s=0.0, recipe_keys=gc.needed_keys(recipe, log=lambda _: None)
    )
    assert not {Path(name).stem for name in only_these.orphans} & own
    assert only_these.foreign == []
    without = gc.survey(recipe.cache_dir, keep_s=0.0, recipe_keys=[])
    assert own <= {Path(name).stem for name in without.orphans}


def test_verify_finds_a_damaged_picture_and_a_repair_draws_it_again(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Tables(recipe.output_dir)
    before = pixels_of(prepared(recipe))
    needed = [each for each in verify.needed_entries(recipe, tables) if each.spec.kind in KINDS]
    assert len(needed) == 24
    assert verify.verify(recipe, needed, log=lambda _: None) == []

    store = RecipeEntries(recipe).store
    damaged = next(store.path(each.spec) for each in needed if each.spec.kind == "pictures")
    raw = bytearray(damaged.read_bytes())
    raw[-3] ^= 4
    damaged.write_bytes(raw)
    bad = verify.verify(recipe, needed, log=lambda _: None)
    assert [each.path for each in bad] == [str(damaged)]
    assert "seed 0" in bad[0].needed.name

    monkeypatch.setattr(verify, "LocalLaunch", lambda _: InProcessLaunch())
    verify.repair(recipe, tables, bad, log=lambda _: None)
    assert verify.verify(recipe, needed, log=lambda _: None) == []
    after = pixels_of(prepared(recipe))
    assert all(np.array_equal(before[each], after[each]) for each in before)


def test_explain_shows_the_features_of_an_image(recipe: Recipe) -> None:
    facts = {
        each.stage: each.facts for each in explain(recipe, Tables(recipe.output_dir), "photos/64x64-0.jpg")
    }
    features = facts[f"features entry of {SCORER}"]
    assert features["state"] == "valid"
    assert features["features [12]"] == "float32"


def test_plan_counts_the_pictures_and_their_time(trained: Project) -> None:
    recipe = evaluated_recipe(trained, pictures=3, strengths=[0.5, 1.0])
    valid = Tables(recipe.output_dir).read("validated_dataset")
    assert forecast_pictures(RecipeEntries(trained.recipe), valid) is None
    entries = RecipeEntries(recipe)
    pictures = forecast_pictures(entries, valid)
    assert pictures is not None
    assert (pictures.prompts, pictures.pictures_per_prompt, pictures.steps) == (2, 3, 2)
    # The base model and two strengths of the steps 2 and 4.
    assert pictures.pictures == 2 * 3 * (1 + 2 * 2)
    assert pictures.seconds is None

    record_speed(entries.machine_state_dir, "pictures", 0.5)
    timed = forecast_pictures(entries, valid)
    # 64x64 and 32x64 pixels at two steps are 2 units and 1 unit.
    assert timed is not None
    assert timed.seconds == pytest.approx(0.5 * (2 + 1) * 3 * 5)
    json.dumps(vars(timed))

    auto = forecast_pictures(RecipeEntries(evaluated_recipe(trained, prompts="auto", steps="last")), valid)
    assert auto is not None
    inputs = prepared(recipe).inputs
    held_out, rest = (
        inputs.filter(held_out=each)["captions"].list.first().n_unique() for each in (True, False)
    )
    captions = min(NUM_CAPTIONS, held_out) + min(NUM_CAPTIONS, held_out, rest)
    assert (auto.steps, auto.prompts) == (1, captions + len(BASE_PROMPTS))
