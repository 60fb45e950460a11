"""Crops: position and seeding of random crops, and top crops; test_placement.py has the focus."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.images.geometry import Placement, Size, ladder
from pipeline.images.geometry.crops import focus_start, random_corner

edges = st.integers(1, 40_000)
sizes = st.builds(Size, edges, edges)


@given(sizes, st.text(max_size=20), st.integers(0, 2**63 - 1))
def test_a_random_crop_is_inside_the_image_and_reproducible(size: Size, name: str, seed: int) -> None:
    placement = Placement((ladder(512, 64, 3.0),), crop="random", crop_seed=seed)
    geometry = placement.assign(size, name)
    assert geometry is not None
    assert geometry == placement.assign(size, name)
    assert 0 <= geometry.crop.top <= geometry.resized_size.height - geometry.crop.height
    assert 0 <= geometry.crop.left <= geometry.resized_size.width - geometry.crop.width


def test_random_crops_are_uniform_and_depend_on_the_seed() -> None:
    """A bucket of 64x64 and images resized to 67x64: four positions, 4,000 sample ids."""
    names = [f"photos/{index}.jpg" for index in range(4000)]
    placement = Placement((ladder(64, 64, 1.0),), crop="random")
    tops = placement.assign_many([67] * 4000, [64] * 4000, names).columns.crop_top
    # The count of each position has mean 1,000 and standard deviation 27; 200 is more than seven deviations.
    counts = dict(enumerate(np.bincount(tops, minlength=4).tolist()))
    assert counts == pytest.approx(dict.fromkeys(range(4), 1000), abs=200), "samples by top edge"
    other = Placement((ladder(64, 64, 1.0),), crop="random", crop_seed=1)
    assert (other.assign_many([67] * 4000, [64] * 4000, names).columns.crop_top != tops).any()


@pytest.mark.parametrize(
    ("seed", "tops", "lefts"),
    [
        (0, [226415137, 226718853, 2084751721], [0, 105, 0]),
        (7, [389972791, 1882251758, 32161953], [0, 877, 0]),
    ],
)
def test_random_crops_stay_the_same_in_every_version(seed: int, tops: list[int], lefts: list[int]) -> None:
    """A crop is part of its latent's key, so that another position would encode the image again."""
    names = ["photos/a.jpg", "photos/b.jpg", "fotos/\u00fc.png"]
    excess_height, excess_width = np.full(3, 2**31 - 1), np.array([3, 1000, 0])
    top, left = random_corner(excess_height, excess_width, seed=seed, names=names, image=np.arange(3))
    assert (top.tolist(), left.tolist()) == (tops, lefts)


@pytest.mark.parametrize(
    ("point", "resized", "target", "start"),
    [
        (0.0, 10, 4, 0),
        (0.2, 10, 4, 0),
        (0.25, 10, 4, 0),
        (0.3, 10, 4, 1),
        (0.39, 10, 4, 1),
        (0.4, 10, 4, 2),
        (0.8, 10, 4, 6),
        (1.0, 10, 4, 6),
        (0.45, 10, 5, 2),
        (0.75, 10, 5, 5),
        (0.5, 11, 10, 0),
        (1.0, 11, 10, 1),
        (0.9, 10, 10, 0),
    ],
)
def test_a_focused_crop_starts_half_its_length_before_the_point(
    point: float, resized: int, target: int, start: int
) -> None:
    """It stays inside the image. Keys and pixels of existing caches depend on the exact start."""
    starts = focus_start(np.array([point]), resized=np.array([resized]), target=np.array([target]))
    assert starts.tolist() == [start]


def test_a_crop_focused_on_the_middle_is_the_central_crop() -> None:
    resized, target = np.array([(r, t) for r in range(1, 20) for t in range(1, r + 1)]).T
    assert focus_start(0.5, resized=resized, target=target).tolist() == ((resized - target) // 2).tolist()


def test_a_top_crop_keeps_the_upper_part_and_is_horizontally_centred() -> None:
    placement = Placement((ladder(64, 64, 1.0),), crop="top")
    tall, wide = placement.assign(Size(100, 64)), placement.assign(Size(64, 100))
    assert tall is not None
    assert wide is not None
    assert (tall.crop.top, tall.crop.left) == (0, 0)
    assert (wide.crop.top, wide.crop.left) == (0, 18)
