"""The score reads shape, colour and background from pixels, and tells the concept from everything else."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from PIL import Image

from demo.score import read_picture, score
from demo.world import CONCEPT, SHAPES, Array, Scene, draw_scene, random_scenes, scenes


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
