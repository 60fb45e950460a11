"""The demo's world: equal seeds give equal pictures, and the concept is not part of the base model's."""

from __future__ import annotations

from itertools import islice

import numpy as np

from demo.world import BACKGROUNDS, COLOURS, CONCEPT, SHAPES, Scene, draw_scene, random_scenes, scenes


def test_equal_seeds_give_equal_pictures_and_captions() -> None:
    def drawn() -> list[tuple[str, bytes]]:
        random = np.random.default_rng(3)
        batch = islice(random_scenes(random, doodles=0.5), 20)
        return [(scene.caption, draw_scene(scene, random).tobytes()) for scene in batch]

    assert drawn() == drawn()


def test_two_pictures_of_one_scene_differ() -> None:
    random = np.random.default_rng(0)
    scene = Scene("star", "red", "white")
    assert (draw_scene(scene, random) != draw_scene(scene, random)).any()


def test_the_base_model_never_sees_the_concept() -> None:
    seen = {each.shape for each in islice(random_scenes(np.random.default_rng(0), doodles=0.5), 20_000)}
    assert seen > set(SHAPES)
    assert CONCEPT not in seen


def test_scenes_cover_every_colour_and_background() -> None:
    assert len(set(scenes(*SHAPES))) == len(SHAPES) * len(COLOURS) * len(BACKGROUNDS)


def test_captions_have_the_right_article() -> None:
    assert Scene("star", "orange", "white").caption == "an orange star on a white background"
    assert Scene("star", "red", "gray").caption == "a red star on a gray background"
