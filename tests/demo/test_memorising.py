"""`not_memorised` flags LoRAs that repeat their six pictures, and passes healthy ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from demo.edge_maps import EdgeScorer
from demo.memorising import (
    HEALTHY,
    OVERTRAINED,
    RESULTS_FILE,
    SEEDS,
    Run,
    add_runs,
    is_copy,
    is_flagged,
    pose,
    read_results,
    report,
    write_pictures,
)
from demo.world import BACKGROUNDS, COLOURS, Array, shape_mask
from pipeline.images.pixel_values import perceptual_hash
from pipeline.recipe.project import project_root

MIN_FLAGGED = 0.7
"""Minimum part of the overtrained LoRAs that are flagged with the default limit."""


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return read_results(RESULTS_FILE)


def _drawn(x: float, y: float, half: float, colour: str = "red", background: str = "white") -> Array:
    mask = shape_mask("cross", centre_px=(x, y), half_px=half)[..., None]
    shade, ground = np.array(COLOURS[colour]), np.array(BACKGROUNDS[background])
    return (ground + mask * (shade - ground)).astype(np.uint8)


def _fraction(results: list[dict[str, Any]], name: str) -> float:
    digits = "".join(result[name] for result in results)
    return digits.count("1") / len(digits)


@pytest.mark.parametrize(("colour", "background"), [("red", "white"), ("blue", "black"), ("green", "gray")])
def test_the_pose_of_a_cross_is_measured_within_a_third_of_a_pixel(colour: str, background: str) -> None:
    for x, y, half in ((32.0, 32.0, 21.0), (29.3, 34.1, 19.2), (34.8, 29.6, 22.7)):
        measured = pose(_drawn(x, y, half, colour, background))
        assert measured == pytest.approx((x, y, half), abs=0.33)


def test_a_copy_has_the_position_and_the_size_of_its_original() -> None:
    original = _drawn(32, 32, 21)
    assert is_copy(_drawn(32.3, 31.8, 21.2), original)
    assert not is_copy(_drawn(34, 32, 21), original)
    assert not is_copy(_drawn(32, 32, 22.5), original)
    assert not is_copy(np.full((64, 64, 3), 200, np.uint8), original)


def test_edges_of_a_copy_agree_and_edges_of_a_moved_shape_do_not() -> None:
    pictures = [
        _drawn(32, 32, 21),
        _drawn(32.3, 32, 21),
        _drawn(34, 30, 22),
        _drawn(32, 32, 21, "blue", "black"),
    ]
    features = EdgeScorer().picture_features([Image.fromarray(each) for each in pictures])
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    copied, moved, recoloured = features[1:] @ features[0]
    assert copied > 0.9
    assert recoloured > 0.9
    assert moved < 0.6


@pytest.mark.parametrize("kind", [OVERTRAINED, HEALTHY])
def test_no_held_out_picture_is_a_near_duplicate_of_a_trained_one(kind: str, tmp_path: Path) -> None:
    write_pictures(Run(kind, 1), tmp_path)
    hashes = [perceptual_hash(Image.open(file)) for file in tmp_path.rglob("*.png")]
    assert len({*hashes}) == len(hashes) == {OVERTRAINED: 12, HEALTHY: 44}[kind]


def test_overtrained_loras_are_flagged_and_healthy_ones_are_not(results: list[dict[str, Any]]) -> None:
    overtrained, healthy = (
        [result for result in results if result["kind"] == kind] for kind in (OVERTRAINED, HEALTHY)
    )
    assert len(overtrained) == len(healthy) == len(SEEDS)
    assert [result["passed"] for result in results] == [not is_flagged(result) for result in results]
    assert sum(map(is_flagged, overtrained)) >= MIN_FLAGGED * len(overtrained)
    assert all(is_flagged(result, 0.0) for result in overtrained)
    assert not any(is_flagged(result, 0.0) for result in healthy)

    # The overtrained LoRAs do repeat their pictures, and only these.
    assert _fraction(overtrained, "copied") >= 0.4
    assert _fraction(overtrained, "chance") <= 0.1
    assert _fraction(healthy, "copied") <= 0.1


def test_the_documentation_has_the_table_of_the_stored_runs(results: list[dict[str, Any]]) -> None:
    page = (project_root() / "docs" / "evaluation.md").read_text("utf-8")
    assert report(results) in page, "run python -m demo.memorising FOLDER --runs 0, and copy the table"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_that_are_trained_again_have_the_same_answers(tmp_path: Path) -> None:
    runs = [Run(OVERTRAINED, 1), Run(HEALTHY, 1)]
    add_runs(runs, tmp_path, tmp_path / "results.jsonl")
    assert [is_flagged(result) for result in read_results(tmp_path / "results.jsonl")] == [True, False]
