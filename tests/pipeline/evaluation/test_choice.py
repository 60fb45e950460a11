"""The earliest step that is as good as the best is chosen, if it breaks no limit and the pictures suffice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
import pytest

from pipeline.evaluation.choice import Choice, choose
from pipeline.evaluation.numbers import Measured, measure, measured
from tests.pipeline.evaluation.feature_case import references, scored

CONCEPT, NEITHER, HOUSE = np.eye(3)

STEPS = {100: 0.3, 200: 0.81, 300: 0.812, 400: 0.8}
"""Similarity to the concept by step."""


def evaluated(
    learned: Mapping[int, float],
    *,
    drift: Mapping[int, float] | None = None,
    noise: float = 0.02,
    prompts: int = 8,
    texts: Any = None,
    strength: float = 1.0,
    seed: int = 0,
) -> Measured:
    """Return an evaluation in which a step's pictures have these cosines to the concept, and these drifts."""
    random = np.random.default_rng(seed)
    pictures: list[dict[str, Any]] = []
    for step, mean in {0: 0.0, **learned}.items():
        cells = [(f"zorp {number}", picture) for number in range(prompts) for picture in range(4)]
        # Noise of a picture that is the same in all steps, and some of each step.
        for index, (prompt, picture) in enumerate(cells):
            level = mean + (noise * random.normal() if step else 0) + 0.1 * np.sin(index)
            feature = level * CONCEPT + np.sqrt(max(0.0, 1 - level**2)) * NEITHER
            pictures.append(
                {"step": step, "prompt": prompt, "seed": picture, "feature": feature, "strength": strength}
            )
        away = (drift or {}).get(step, 0.0)
        house = (1 - away) * HOUSE + np.sqrt(1 - (1 - away) ** 2) * NEITHER
        pictures += [
            {
                "step": step,
                "prompt": "a house",
                "seed": picture,
                "role": "base",
                "feature": house,
                "strength": strength,
            }
            for picture in range(4)
        ]
    return measure([scored(pictures, held_out=references([CONCEPT]), texts=texts)])


def test_the_earliest_step_that_is_as_good_as_the_best_is_chosen() -> None:
    choice = choose(evaluated(STEPS), {})
    assert choice.step == 200
    assert choice.best in (200, 300, 400)
    assert choice.decided
    assert "learned 0." in choice.why


def test_a_step_that_is_measurably_worse_is_not_chosen() -> None:
    assert choose(evaluated({100: 0.3, 200: 0.7, 300: 0.81}), {}).step == 300


def test_a_step_that_is_a_little_but_certainly_worse_is_not_chosen() -> None:
    assert choose(evaluated({100: 0.79, 200: 0.8}, noise=0.002), {}).step == 200


def test_a_step_that_loses_more_than_one_percent_is_not_chosen_even_if_chance_may_explain_it() -> None:
    measured = evaluated({100: 0.36, 200: 0.4}, noise=0.12, seed=3)
    assert [str(each.learned) for each in measured.steps] == ["0.36 (0.30 to 0.42)", "0.39 (0.33 to 0.45)"]
    assert choose(measured, {}).step == 200


def test_a_step_after_the_best_is_not_chosen() -> None:
    choice = choose(evaluated({100: 0.3, 200: 0.8, 300: 0.5}), {})
    assert (choice.step, choice.best) == (200, 200)
    assert choice.why.startswith("step 200 is the best of 3: learned 0.8")


def test_a_step_that_breaks_a_limit_is_not_chosen_and_the_reason_names_it() -> None:
    measured = evaluated({100: 0.3, 200: 0.5, 300: 0.81}, drift={200: 0.05, 300: 0.2})
    assert choose(measured, {"drift": 0.3}).step == 300
    choice = choose(measured, {"drift": 0.15})
    assert choice.step == 200
    assert choice.why.endswith(". Step 300 breaks a limit: drift 0.20 (0.20 to 0.20) above 0.15")


def test_nothing_is_chosen_if_all_steps_break_a_limit() -> None:
    choice = choose(evaluated({100: 0.3, 200: 0.8}, drift={100: 0.2, 200: 0.4}), {"drift": 0.15})
    assert not choice.decided
    assert choice.why.startswith("not decided: every step breaks a limit; step 100 has drift 0.20")


def test_nothing_is_chosen_if_no_step_is_measurably_better_than_the_base() -> None:
    choice = choose(evaluated({100: 0.0, 200: 0.01}, noise=0.3), {})
    assert choice.step is None
    assert "no step draws the concept measurably better" in choice.why


def test_few_pictures_of_steps_that_differ_little_decide_nothing() -> None:
    steps = {100: 0.45, 200: 0.5, 300: 0.5}
    few, many = (choose(evaluated(steps, noise=0.2, prompts=prompts, seed=1), {}) for prompts in (4, 60))
    assert few.step is None
    assert "16 pictures per step cannot tell" in few.why
    assert many.decided


def test_a_limit_of_an_absent_number_is_kept() -> None:
    assert choose(evaluated(STEPS), {"copies": 0.1}).step == 200


@pytest.mark.parametrize(("copies", "is_excluded"), [(0.11, False), (0.5, True)])
def test_copies_exclude_a_step_only_if_their_whole_interval_is_above_the_limit(
    copies: float, is_excluded: bool
) -> None:
    learned = evaluated(STEPS).scores
    swing = pl.when(pl.int_range(pl.len()) % 2 == 0).then(0.15).otherwise(-0.15)
    rows = learned.filter(number="learned").with_columns(number=pl.lit("copies"), score=copies + swing)
    choice = choose(measured(pl.concat([learned, rows])), {"copies": 0.1})
    assert (choice.step is None) == is_excluded
    assert ("every step breaks a limit; step 100 has copies 0.50" in choice.why) == is_excluded


def test_without_a_holdout_nothing_is_chosen() -> None:
    pictures = [
        {"step": step, "prompt": "a house", "seed": 0, "role": "base", "feature": HOUSE} for step in (0, 100)
    ]
    choice = choose(measure([scored(pictures)]), {})
    assert choice == Choice(None, f"not decided: {measure([scored(pictures)]).absent['learned']}")


def test_a_step_that_ignores_the_rest_of_the_prompt_is_not_chosen() -> None:
    # Both draw the concept; step 200 no longer draws what the text says.
    texts = {f"zorp {number}": HOUSE + 0.1 * CONCEPT for number in range(8)} | {"a house": HOUSE}
    pictures: list[dict[str, Any]] = []
    random = np.random.default_rng(4)
    for step, feature in ((0, HOUSE), (100, CONCEPT + HOUSE), (200, 1.6 * CONCEPT + HOUSE - 0.9 * HOUSE)):
        pictures += [
            {
                "step": step,
                "prompt": f"zorp {number}",
                "seed": seed,
                "feature": feature + random.normal(0, 0.05, 3),
            }
            for number in range(8)
            for seed in range(2)
        ]
    with_texts = choose(measure([scored(pictures, texts=texts, held_out=references([CONCEPT]))]), {})
    without = choose(measure([scored(pictures, held_out=references([CONCEPT]))]), {})
    assert (with_texts.step, without.step) == (100, 200)


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_steps_that_were_drawn_at_one_strength_are_compared_there(strength: float) -> None:
    assert choose(evaluated(STEPS, strength=strength), {}).step == 200


def test_the_choice_does_not_depend_on_the_order_of_pictures() -> None:
    measured = evaluated(STEPS, noise=0.1)
    shuffled = Measured(
        measured.scores.sample(fraction=1.0, shuffle=True, seed=1),
        measured.steps,
        measured.by_scorer,
        measured.absent,
        measured.bleeding,
    )
    assert choose(measured, {}) == choose(shuffled, {})
