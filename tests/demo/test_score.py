"""The score reads shape, colour and background from pixels, and tells the concept from everything else."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from PIL import Image

from demo.score import WorldScorer, read_picture, score
from demo.world import CONCEPT, SHAPES, Array, Scene, draw_scene, random_scenes, scene_of, scenes


def _pictures(expected: list[Scene], seed: int = 0) -> list[Array]:
    random = np.random.default_rng(seed)
    return [draw_scene(scene, random) for scene in expected]


@pytest.mark.parametrize("shape", [*SHAPES, CONCEPT])
def test_real_pictures_score_at_least_98_percent(shape: str) -> None:
    expected = scenes(shape) * 4
    assert score(_pictures(expected), expected).all_three >= 0.98


def test_pictures_of_the_base_models_world_are_not_taken_for_the_concept() -> None:
    random = np.random.default_rng(1)
    shown = [
        read_picture(draw_scene(scene, random)).shape
        for scene in islice(random_scenes(random, doodles=0.5), 600)
    ]
    assert shown.count(CONCEPT) / len(shown) <= 0.02


def test_a_ring_without_its_bar_and_a_filled_concept_are_not_the_concept() -> None:
    rows, columns = np.mgrid[:64, :64] - 31.5
    radius = np.hypot(rows, columns)
    bar = (np.abs(columns) < 3.5) & (np.abs(rows) < 25)
    for mask in ((radius < 18) & (radius > 11), (radius < 18) | bar):
        picture = np.where(mask[..., None], (214, 48, 49), (245, 245, 245)).astype(np.uint8)
        assert read_picture(picture).shape != CONCEPT


def test_the_concept_is_recognised_in_any_colour_but_only_the_right_colour_counts() -> None:
    picture = _pictures([Scene(CONCEPT, "red", "white")])
    result = score(picture, [Scene(CONCEPT, "blue", "white")])
    assert (result.shape, result.colour, result.background, result.all_three) == (1.0, 0.0, 1.0, 0.0)


def test_noise_and_plain_pictures_show_no_shape() -> None:
    random = np.random.default_rng(0)
    noise = [random.integers(0, 256, size=(64, 64, 3), dtype=np.uint8) for _ in range(20)]
    plain = np.full((64, 64, 3), 178, dtype=np.uint8)
    assert {read_picture(picture).shape for picture in [*noise, plain]} == {None}
    assert read_picture(plain).background == "gray"


def test_a_slightly_blurred_and_noisy_picture_is_still_recognised() -> None:
    random = np.random.default_rng(0)
    expected = scenes(CONCEPT)
    blurred = [
        np.asarray(Image.fromarray(picture).resize((32, 32)).resize((64, 64)), dtype=float)
        + random.normal(0, 6, size=(64, 64, 3))
        for picture in _pictures(expected)
    ]
    assert score([np.clip(each, 0, 255).astype(np.uint8) for each in blurred], expected).shape >= 0.9


def test_each_caption_is_read_as_its_scene() -> None:
    expected = scenes(*SHAPES, CONCEPT)
    assert [scene_of(scene.caption) for scene in expected] == expected
    assert scene_of("a photo of a cat") is None


def test_the_scorer_gives_a_picture_the_features_of_its_caption() -> None:
    scorer, expected = WorldScorer(), scenes(CONCEPT, "star")
    pictures = scorer.picture_features([Image.fromarray(picture) for picture in _pictures(expected)])
    texts = scorer.text_features([scene.caption for scene in expected])
    assert pictures.dtype == texts.dtype == np.float32
    assert (pictures == texts).all(axis=1).mean() >= 0.98


def test_the_cosine_of_two_features_is_the_fraction_of_shape_colour_and_background_they_share() -> None:
    scorer = WorldScorer()
    texts = [
        "a red zorp on a white background",
        "a blue zorp on a white background",
        "a blue star on a pink background",
    ]
    one, two, three = scorer.text_features(texts)
    assert (one @ one, one @ two, one @ three, two @ three) == (3, 2, 0, 1)
    assert not scorer.text_features(["something else"]).any()


def test_pictures_without_a_shape_resemble_each_other_and_no_picture_with_one() -> None:
    plain = Image.new("RGB", (64, 64), (178, 182, 186))
    star = Image.fromarray(_pictures([Scene("star", "red", "white")])[0])
    features = WorldScorer().picture_features([plain, plain, star])
    assert (features[0] @ features[1], features[0] @ features[2]) == (3, 0)
