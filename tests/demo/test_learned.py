"""The targets of what the demo's LoRA must have learned, and the sheet that shows it."""

from __future__ import annotations

import numpy as np
import pytest

from demo.concept_pictures import concept_scenes
from demo.learned import Learned, before_after_sheet
from demo.world import draw_scene


@pytest.mark.parametrize("known", [(1.0, 0.9), (0.8, 0.7), (0.7, 0.6)], ids=str)
def test_scores_at_the_targets_miss_none_of_them(known: tuple[float, float]) -> None:
    assert Learned(0.1, 0.4, *known).missed_targets() == []


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (Learned(0.11, 1.0, 1.0, 1.0), "the base model draws the concept: 0.11"),
        (Learned(0.0, 0.39, 1.0, 1.0), "the concept scores 0.39, not 0.4"),
        (Learned(0.0, 1.0, 0.9, 0.79), "known shapes lost 0.11, more than 0.1"),
    ],
    ids=str,
)
def test_each_missed_target_is_named(scores: Learned, expected: str) -> None:
    assert scores.missed_targets() == [expected]


def test_the_sheet_shows_the_enlarged_pictures_of_each_prompt_below_one_another() -> None:
    scenes = concept_scenes()[:3]
    before, after = ([draw_scene(scene, np.random.default_rng(seed)) for scene in scenes] for seed in (0, 1))
    sheet = np.asarray(before_after_sheet([scene.caption for scene in scenes], before, after))
    for pictures, top_px in ((before, 44), (after, 280)):
        for column, picture in enumerate(pictures):
            left_px = 12 + 204 * column
            shown = sheet[top_px : top_px + 192 : 3, left_px : left_px + 192 : 3]
            assert (shown == picture).all()
