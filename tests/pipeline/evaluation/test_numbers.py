"""The four numbers agree with their formulas, and copies is 0 for new images of the concept."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from pipeline.evaluation.numbers import NUMBERS, SCORES, Measured, measure
from tests.pipeline.evaluation.feature_case import NO_IMAGES, references, scored

RANDOM = np.random.default_rng(3)


def _cos(left: Any, right: Any) -> float:
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))


def _random_pictures(roles: dict[str, list[str]], steps: tuple[int, ...] = (0, 10, 20)) -> list[Any]:
    return [
        {"step": step, "prompt": prompt, "seed": seed, "role": role, "feature": RANDOM.normal(size=5)}
        for step in steps
        for role, prompts in roles.items()
        for prompt in prompts
        for seed in range(3)
    ]


def _mean(measured: Measured, step: int, number: str) -> float:
    value = next(each for each in measured.steps if each.step == step)[number]
    assert value is not None, number
    return value.mean


def test_all_numbers_agree_with_a_loop_over_pictures() -> None:
    roles = {
        "concept": ["a zorp", "my zorp"],
        "trained": ["red zorp"],
        "other": ["a cat"],
        "base": ["a house", "a tree"],
    }
    pictures = _random_pictures(roles)
    texts = {prompt: RANDOM.normal(size=5) for prompts in roles.values() for prompt in prompts}
    held_out = references(RANDOM.normal(size=(4, 5)), captions=["my zorp", "b", "my zorp", "c"])
    training = references(RANDOM.normal(size=(4, 5)), captions=["red zorp", "d", "red zorp", "e"])
    measured = measure([scored(pictures, texts=texts, held_out=held_out, training=training)])

    base = {
        (each["role"], each["prompt"], each["seed"]): each["feature"] for each in pictures if not each["step"]
    }
    drawn_at = {(each["step"], each["prompt"], each["seed"]): each["feature"] for each in pictures}
    for step in (10, 20):
        expected: dict[str, list[float]] = {number: [] for number in NUMBERS}
        for each in pictures:
            if each["step"] != step:
                continue
            drawn, before = each["feature"], base[each["role"], each["prompt"], each["seed"]]
            if each["role"] == "base":
                expected["drift"].append(1 - _cos(drawn, before))
                continue
            if each["role"] == "trained":
                new = drawn_at[step, "my zorp", each["seed"]]
                trained = [_cos(drawn, training.features[index]) for index in (0, 2)]
                untrained = [_cos(new, held_out.features[index]) for index in (0, 2)]
                expected["copies"].append(sum(trained) / 2 - sum(untrained) / 2)
                continue
            text = texts[each["prompt"]]
            expected["obeys"].append(_cos(drawn, text) - _cos(before, text))
            if each["role"] == "concept":
                own = held_out.features[[0, 2]] if each["prompt"] == "my zorp" else held_out.features
                closer = [_cos(drawn, image) - _cos(before, image) for image in own]
                expected["learned"].append(sum(closer) / len(closer))
        for number in NUMBERS:
            assert _mean(measured, step, number) == pytest.approx(np.mean(expected[number]), abs=1e-5), number


def test_scores_have_one_row_per_picture_and_number() -> None:
    pictures = _random_pictures({"concept": ["a zorp"], "base": ["a house"]})
    measured = measure([scored(pictures, held_out=references(RANDOM.normal(size=(2, 5))))])
    assert measured.scores.schema == pl.Schema(SCORES)
    by_number = dict(measured.scores["number"].value_counts().iter_rows())
    assert by_number == {"learned": 6, "drift": 6}
    assert measured.scores["picture"].n_unique() == 12


def test_pictures_for_a_caption_that_equal_its_trained_image_are_copies() -> None:
    """An image has the content of its caption, and details that no caption names."""
    random = np.random.default_rng(4)
    contents = {caption: random.normal(size=16) for caption in [*"abcdef", *"uvwxyz"]}

    def images(captions: str) -> Any:
        return [contents[caption] + random.normal(0, 0.5, 16) for caption in captions]

    training, held_out = images("abcdef"), images("uvwxyz")
    pictures = [
        {"step": step, "prompt": caption, "seed": seed, "role": role, "feature": feature}
        for role, captions in (("trained", "abcdef"), ("concept", "uvwxyz"))
        for caption in captions
        for seed in range(4)
        for step, feature in (
            (0, random.normal(size=16)),
            (10, images(caption)[0]),
            (20, training["abcdef".index(caption)] if role == "trained" else images(caption)[0]),
        )
    ]
    measured = measure(
        [
            scored(
                pictures,
                held_out=references(held_out, captions="uvwxyz"),
                training=references(training, captions="abcdef"),
            )
        ]
    )

    # A picture for a held-out caption is closer to that image than to any trained one, also of step 20.
    healthy, memorised = (each.copies for each in measured.steps)
    assert healthy is not None
    assert memorised is not None
    assert healthy.low is not None
    assert healthy.high is not None
    assert healthy.low < 0 < healthy.high
    assert memorised.low is not None
    assert memorised.low > 0.1
    assert memorised.cells == 24


def test_with_one_caption_for_all_images_repeating_trained_ones_is_copying() -> None:
    random = np.random.default_rng(5)

    def images(number: int) -> Any:
        return 1.0 + random.normal(size=(number, 16))

    training, held_out = images(40), images(5)
    cells = [(f"p{prompt}", seed) for prompt in range(10) for seed in range(4)]
    new, copied = images(40), training + random.normal(0, 0.1, (40, 16))
    pictures = [
        {"step": step, "prompt": prompt, "seed": seed, "feature": features[index]}
        for step, features in ((0, images(40)), (10, new), (20, copied))
        for index, (prompt, seed) in enumerate(cells)
    ]
    measured = measure([scored(pictures, held_out=references(held_out), training=references(training))])

    # Without the comparison with real images, the nearest of 40 is closer than the nearest of 5 by 0.13.
    assert _mean(measured, 10, "copies") == pytest.approx(0.0, abs=0.05)
    assert _mean(measured, 20, "copies") > 0.25


def test_near_duplicates_in_the_holdout_do_not_count_as_each_others_neighbours() -> None:
    random = np.random.default_rng(6)
    single = random.normal(size=(8, 16))
    twice = np.concatenate([single, single])
    pictures = [
        {"step": step, "prompt": f"p{index}", "seed": 0, "feature": 1 + random.normal(size=16)}
        for step in (0, 10)
        for index in range(4)
    ]
    training = references(random.normal(size=(8, 16)))
    groups = [str(index % 8) for index in range(16)]
    copies = [
        _mean(measure([scored(pictures, held_out=held_out, training=training)]), 10, "copies")
        for held_out in (references(single), references(twice, groups=groups))
    ]
    assert copies[0] == pytest.approx(copies[1], abs=1e-6)


def test_numbers_that_need_missing_images_or_texts_are_absent_with_a_reason() -> None:
    pictures = _random_pictures({"concept": ["a zorp"]})
    measured = measure(
        [scored(pictures, held_out=NO_IMAGES, training=references(RANDOM.normal(size=(3, 5))))]
    )
    assert set(measured.absent) == set(NUMBERS)
    assert "validation_fraction" in measured.absent["learned"]
    assert measured.steps == ()
    assert measured.bleeding == ()


def test_one_held_out_image_gives_learned_but_not_copies() -> None:
    pictures = _random_pictures({"concept": ["a zorp"]})
    held_out, training = references(RANDOM.normal(size=(1, 5))), references(RANDOM.normal(size=(3, 5)))
    measured = measure([scored(pictures, held_out=held_out, training=training)])
    assert set(measured.absent) == {"obeys", "drift", "copies"}
    assert measured.steps[0].as_json()["copies"] is None
    assert measured.steps[0].as_json()["learned"]["pictures"] == 3


def test_each_number_is_from_the_first_scorer_that_has_it() -> None:
    pictures = _random_pictures({"concept": ["a zorp"], "base": ["a house"]})
    held_out = references(RANDOM.normal(size=(3, 5)))
    texts = {"a zorp": RANDOM.normal(size=5), "a house": RANDOM.normal(size=5)}
    dino = scored(pictures, held_out=held_out, scorer="dino")
    clip = scored(
        _random_pictures({"concept": ["a zorp"], "base": ["a house"]}),
        texts=texts,
        held_out=held_out,
        scorer="clip",
    )
    measured = measure([dino, clip])
    step, by_dino, by_clip = (
        each[0] for each in (measured.steps, measured.by_scorer["dino"], measured.by_scorer["clip"])
    )
    assert (step.learned, step.drift, step.obeys) == (by_dino.learned, by_dino.drift, by_clip.obeys)
    assert by_dino.obeys is None
    assert by_clip.learned is not None
    assert by_clip.learned != by_dino.learned


def test_steps_are_in_order_and_strengths_are_separate() -> None:
    pictures = _random_pictures({"base": ["a house"]}, steps=(0, 200, 30))
    half = [{**each, "strength": 0.5} for each in pictures if each["step"] == 200]
    measured = measure([scored([*pictures, *half])])
    assert [(each.step, each.strength) for each in measured.steps] == [(30, 1.0), (200, 0.5), (200, 1.0)]
    assert [each.drift and each.drift.cells for each in measured.steps] == [3, 3, 3]


def _two_concepts(*, swapped: bool) -> Any:
    """Return an evaluation in which step 10 draws each concept, or the other one, in its own direction."""
    directions = {"zorp": np.array([1.0, 0, 0]), "blick": np.array([0, 1.0, 0])}
    other = {"zorp": "blick", "blick": "zorp"}
    pictures = [
        {
            "step": step,
            "prompt": f"{concept} {number}",
            "seed": seed,
            "concept": concept,
            "feature": np.array([0, 0, 1.0])
            + (directions[other[concept] if swapped else concept] if step else 0)
            + RANDOM.normal(0, 0.1, 3),
        }
        for step in (0, 10)
        for concept in directions
        for number in range(4)
        for seed in range(2)
    ]
    images = references(
        np.repeat(np.stack(list(directions.values())), 2, axis=0), concept=["zorp"] * 2 + ["blick"] * 2
    )
    return measure([scored(pictures, held_out=images)]).bleeding[0]


def test_two_concepts_that_are_learned_are_on_the_diagonal() -> None:
    bleeding = _two_concepts(swapped=False)
    matrix = np.array([[cell.mean for cell in row] for row in bleeding.matrix])
    assert bleeding.concepts == ("blick", "zorp")
    assert matrix.diagonal().min() > 0.5
    assert abs(matrix[0, 1]) < 0.2
    assert abs(matrix[1, 0]) < 0.2
    assert bleeding.bled == ()


def test_two_concepts_with_swapped_captions_are_off_the_diagonal() -> None:
    bleeding = _two_concepts(swapped=True)
    assert set(bleeding.bled) == {("zorp", "blick"), ("blick", "zorp")}
    assert bleeding.as_json()["bled"] == [["blick", "zorp"], ["zorp", "blick"]]


def test_one_concept_has_no_bleeding_matrix() -> None:
    pictures = _random_pictures({"concept": ["a zorp"]})
    assert measure([scored(pictures, held_out=references(RANDOM.normal(size=(2, 5))))]).bleeding == ()


def test_features_of_zeros_are_at_right_angles_to_everything() -> None:
    pictures = [
        {"step": step, "prompt": "a house", "seed": 0, "role": "base", "feature": feature}
        for step, feature in ((0, [1.0, 0, 0]), (10, [0, 0, 0]))
    ]
    assert _mean(measure([scored(pictures)]), 10, "drift") == 1.0
