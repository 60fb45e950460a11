"""Statistics of pixels tell shapes and colours apart, although they know nothing of either."""

from __future__ import annotations

import numpy as np
from PIL import Image

from demo.pixel_statistics import PixelScorer
from demo.world import CONCEPT, SHAPES, Scene, draw_scene


def _features(scene: Scene, number: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return PixelScorer().picture_features([Image.fromarray(draw_scene(scene, random)) for _ in range(number)])


def test_pictures_of_the_concept_resemble_each_other_more_than_pictures_of_other_shapes() -> None:
    concept = _features(Scene(CONCEPT, "red", "white"), 20, seed=0)
    same = _features(Scene(CONCEPT, "red", "white"), 20, seed=1) @ concept.T
    for shape in SHAPES:
        other = _features(Scene(shape, "red", "white"), 20, seed=2) @ concept.T
        assert (same.mean(axis=1) > other.mean(axis=1).mean()).mean() >= 0.9, shape


def test_another_colour_is_less_similar() -> None:
    red = _features(Scene("star", "red", "white"), 10, seed=0)
    again, blue = (_features(Scene("star", colour, "white"), 10, seed=1) for colour in ("red", "blue"))
    assert (again @ red.T).mean() > (blue @ red.T).mean()


def test_features_have_length_one_per_half_and_do_not_depend_on_the_batch() -> None:
    features = _features(Scene("cross", "green", "pink"), 3, seed=3)
    assert features.dtype == np.float32
    np.testing.assert_allclose(np.square(features).sum(axis=1), 2.0, rtol=1e-5)
    np.testing.assert_array_equal(features[:1], _features(Scene("cross", "green", "pink"), 1, seed=3))


def test_a_picture_of_one_colour_has_finite_features() -> None:
    assert np.isfinite(PixelScorer().picture_features([Image.new("RGB", (40, 30), (9, 9, 9))])).all()
