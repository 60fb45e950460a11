"""Placement: several resolutions, the upscale limit, own buckets, and the position of the crop."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BucketError
from pipeline.images.geometry import (
    MAX_BUCKET_EDGE_PX,
    MAX_IMAGE_EDGE_PX,
    Buckets,
    Crop,
    Geometry,
    Placement,
    Size,
    ladder,
    placement_of,
)
from pipeline.images.geometry.crops import CropRule
from pipeline.images.geometry.placement import SmallRule
from pipeline.recipe.buckets import BucketSettings

edges = st.integers(1, 40_000)
sizes = st.builds(Size, edges, edges)
resolutions = st.lists(st.sampled_from([256, 512, 768, 1024]), min_size=1, max_size=3, unique=True)
limits = st.one_of(st.none(), st.sampled_from([Fraction(1), Fraction(3, 2), Fraction(7, 3)]))
ratios = st.sampled_from([1.0, 1.5, 2.0, 3.0, 4.25])


def rules(
    areas: list[int],
    limit: Fraction | None,
    ratio: float,
    small: SmallRule = "own_bucket",
    crop: CropRule = "centre",
) -> Placement:
    sets = tuple(ladder(each, 64, ratio) for each in sorted(areas))
    return Placement(sets, limit, small, crop, crop_seed=3, step=64, max_aspect_ratio=Fraction(ratio))


placements = st.builds(
    rules, resolutions, limits, ratios, st.sampled_from(["own_bucket", "reject"]), st.just("centre")
)


def enlarged(size: Size, target: Size) -> Fraction:
    return max(Fraction(target.height, size.height), Fraction(target.width, size.width))


@given(sizes, resolutions, limits, ratios)
def test_an_image_gets_the_largest_resolution_that_it_fills(
    size: Size, areas: list[int], limit: Fraction | None, ratio: float
) -> None:
    """The oracle compares the nearest bucket of each resolution, from the largest to the smallest."""
    nearest = []
    for each in sorted(areas, reverse=True):
        geometry = Placement((ladder(each, 64, ratio),)).assign(size)
        assert geometry is not None
        nearest.append(geometry.target_size)
    max_scale = limit or Fraction(1)
    filled = [target for target in nearest if enlarged(size, target) <= max_scale]
    placed = rules(areas, limit, ratio, small="reject").assign(size)
    if filled:
        assert placed is not None
        assert placed.target_size == filled[0]
    elif limit is None:
        assert placed is not None
        assert placed.target_size == nearest[-1]
    else:
        assert placed is None


@given(sizes, resolutions, st.sampled_from([Fraction(1), Fraction(3, 2)]), ratios)
def test_no_image_is_enlarged_more_than_the_limit(
    size: Size, areas: list[int], limit: Fraction, ratio: float
) -> None:
    geometry = rules(areas, limit, ratio).assign(size)
    if geometry is None:
        assert min(size) * limit < 64, "only an image smaller than a step has no bucket"
        return
    target = geometry.target_size
    assert enlarged(size, target) <= limit
    assert target.height % 64 == target.width % 64 == 0
    assert max(target) <= min(target) * Fraction(ratio)


@given(sizes, resolutions, st.sampled_from([Fraction(1), Fraction(3, 2)]), ratios)
def test_the_own_bucket_of_a_small_image_is_as_large_as_step_and_aspect_ratio_allow(
    size: Size, areas: list[int], limit: Fraction, ratio: float
) -> None:
    if rules(areas, limit, ratio, small="reject").assign(size) is not None:
        return
    geometry = rules(areas, limit, ratio).assign(size)
    if geometry is None:
        return
    target = geometry.target_size
    for grown in (Size(target.height + 64, target.width), Size(target.height, target.width + 64)):
        too_long = max(grown) > min(grown) * Fraction(ratio)
        assert too_long or enlarged(size, grown) > limit


@given(sizes, placements)
def test_B06_transposing_an_image_transposes_its_placement(size: Size, placement: Placement) -> None:
    if size.height == size.width:
        return
    original, transposed = placement.assign(size), placement.assign(size.transposed)
    if original is None or transposed is None:
        assert original is transposed
        return
    crop = original.crop
    assert transposed == Geometry(
        original.original_size.transposed,
        original.resized_size.transposed,
        Crop(crop.left, crop.top, crop.width, crop.height),
    )


@given(st.lists(sizes, min_size=1, max_size=20), placements, st.sampled_from(["centre", "top", "random"]))
def test_B06_other_images_do_not_matter(originals: list[Size], placement: Placement, crop: CropRule) -> None:
    chosen = Placement(placement.sets, placement.upscale_limit, placement.small, crop, 5, 64)
    names = [f"photos/{index}.jpg" for index in range(len(originals))]
    many = chosen.assign_many([s.height for s in originals], [s.width for s in originals], names)
    for index, size in enumerate(originals):
        single_placements = chosen.assign(size, names[index])
        assert many.too_small[index] == (single_placements is None)
        assert single_placements is None or many.columns.one(index) == single_placements


@pytest.mark.parametrize(
    ("size", "bucket"),
    [
        (Size(300, 300), "256x256"),
        (Size(512, 512), "512x512"),
        (Size(500, 500), "256x256"),
        (Size(2000, 3000), "832x1216"),
        (Size(100, 100), "256x256"),
    ],
    ids=str,
)
def test_several_resolutions_by_example(size: Size, bucket: str) -> None:
    sets = tuple(ladder(each, 64, 3.0) for each in (256, 512, 1024))
    geometry = Placement(sets).assign(size)
    assert geometry is not None
    assert geometry.bucket == bucket


@given(st.lists(sizes, min_size=1, max_size=10), resolutions, limits, ratios)
def test_with_each_an_image_is_used_at_every_resolution_that_it_fills(
    originals: list[Size], areas: list[int], limit: Fraction | None, ratio: float
) -> None:
    """Compare with single resolutions; an image that fills none is placed as with `best`."""
    best = rules(areas, limit, ratio)
    placed = replace(best, per_image="each").assign_many(*zip(*originals, strict=True))
    assert list(placed.image) == sorted(placed.image)
    for index, size in enumerate(originals):
        rows = np.flatnonzero(placed.image == index)
        placements = [None if placed.too_small[row] else placed.columns.one(int(row)) for row in rows]
        single_placements = [
            rules([each], limit, ratio, small="reject").assign(size) for each in sorted(areas)
        ]
        filled = list(dict.fromkeys(each for each in single_placements if each is not None))
        assert placements == (filled or [best.assign(size)])


few_edges = st.sampled_from([64, 128, 192])
few_sizes = st.lists(st.builds(Size, few_edges, few_edges), min_size=1, max_size=3)
small_edges = st.integers(1, 400)


@given(
    st.lists(st.builds(Size, small_edges, small_edges), min_size=1, max_size=10),
    st.lists(few_sizes.map(Buckets), min_size=1, max_size=4).map(tuple),
    limits,
)
def test_with_each_an_image_is_used_once_in_a_size_that_several_resolutions_share(
    originals: list[Size], sets: tuple[Buckets, ...], limit: Fraction | None
) -> None:
    best = Placement(sets, limit, step=64)
    placed = replace(best, per_image="each").assign_many(*zip(*originals, strict=True))
    for index, size in enumerate(originals):
        rows = np.flatnonzero(placed.image == index)
        placements = [None if placed.too_small[row] else placed.columns.one(int(row)) for row in rows]
        single_placements = [replace(best, sets=(each,), small="reject").assign(size) for each in sets]
        filled = list(dict.fromkeys(each for each in single_placements if each is not None))
        assert placements == (filled or [best.assign(size)])


@given(sizes, placements, st.floats(0, 1), st.floats(0, 1))
def test_the_focus_is_as_close_to_the_middle_of_the_crop_as_possible(
    size: Size, placement: Placement, down: float, across: float
) -> None:
    placed = replace(placement, crop="focus").assign_many(
        [size.height], [size.width], None, ([down], [across])
    )
    geometry = placed.columns.one(0)
    crop, resized = geometry.crop, geometry.resized_size
    for share, begins, length, resized_edge in (
        (down, crop.top, crop.height, resized.height),
        (across, crop.left, crop.width, resized.width),
    ):
        possible = {0, resized_edge - length, begins - 1, begins + 1} & set(range(resized_edge - length + 1))
        distances = {other: abs(other + length / 2 - share * resized_edge) for other in possible}
        distance = abs(begins + length / 2 - share * resized_edge)
        assert [other for other in possible if distances[other] + 1 < distance] == [], f"crop at {begins}"


@given(sizes, placements, st.floats(0, 1), st.floats(0, 1))
def test_B06_transposing_image_and_focus_transposes_the_crop(
    size: Size, placement: Placement, down: float, across: float
) -> None:
    if size.height == size.width:
        return
    focused = replace(placement, crop="focus")
    original = focused.assign_many([size.height], [size.width], None, ([down], [across])).columns.one(0)
    transposed = focused.assign_many([size.width], [size.height], None, ([across], [down])).columns.one(0)
    assert transposed.crop == Crop(
        original.crop.left, original.crop.top, original.crop.width, original.crop.height
    )


@given(sizes, placements)
def test_without_a_focus_the_crop_is_central(size: Size, placement: Placement) -> None:
    middle = placement.assign(size)
    assert replace(placement, crop="focus").assign(size) == middle
    halves = replace(placement, crop="focus").assign_many([size.height], [size.width], None, ([0.5], [0.5]))
    assert halves.too_small[0] if middle is None else halves.columns.one(0) == middle


@pytest.mark.parametrize(
    ("original", "resized"),
    [(Size(113, 128), Size(961, 1088)), (Size(128, 113), Size(1088, 961))],
    ids=["half a pixel of height", "half a pixel of width"],
)
def test_a_resized_edge_of_half_a_pixel_is_rounded_up(original: Size, resized: Size) -> None:
    """1088 * 113 / 128 is 960.5. Keys and pixels of existing caches depend on the direction."""
    geometry = Placement((ladder(1024, 64, 3.0),)).assign(original)
    assert geometry is not None
    assert str(geometry.resized_size) == str(resized), f"{original}, scaled to cover {geometry.bucket}"


def test_an_own_bucket_is_not_longer_than_the_longest_bucket() -> None:
    placement = Placement((ladder(1024, 64, 3.0),), Fraction(1), step=64, max_aspect_ratio=Fraction(1000))
    geometry = placement.assign(Size(100, 40_000))
    assert geometry is not None
    assert geometry.target_size == Size(64, MAX_BUCKET_EDGE_PX // 64 * 64)


def test_an_own_bucket_may_have_a_single_step() -> None:
    placement = Placement((ladder(64, 1, 3.0),), Fraction(1), step=1)
    geometry = placement.assign(Size(1, 1))
    assert geometry is not None
    assert geometry.target_size == Size(1, 1)


def test_own_buckets_have_steps_of_8_and_an_aspect_ratio_up_to_3_by_default() -> None:
    placement = Placement((ladder(1024, 64, 3.0),), Fraction(1))
    geometry = placement.assign(Size(47, 400))
    assert geometry is not None
    assert geometry.target_size == Size(40, 120)


def test_the_default_seed_of_random_crops_is_that_of_the_recipe() -> None:
    sets, size = (ladder(64, 64, 1.0),), Size(64, 40_000)
    geometry = Placement(sets, crop="random").assign(size, "photos/a.jpg")
    recipe_seed = BucketSettings().crop_seed
    assert geometry == Placement(sets, crop="random", crop_seed=recipe_seed).assign(size, "photos/a.jpg")


def test_the_geometry_of_one_image_is_that_of_its_largest_resolution() -> None:
    sets = tuple(ladder(each, 64, 3.0) for each in (256, 512, 1024))
    geometry = Placement(sets, per_image="each").assign(Size(600, 600))
    assert geometry is not None
    assert geometry.bucket == "1024x1024"
    geometry = Placement(sets, Fraction(1), per_image="each").assign(Size(600, 600))
    assert geometry is not None
    assert geometry.bucket == "512x512"


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_sizes_may_have_any_integer_type(dtype: type[np.integer]) -> None:
    """Products of these edges exceed 32 bits; the table's columns are Int32."""
    placement = Placement((ladder(1024, 64, 3.0), ladder(4096, 64, 3.0)), Fraction(1), step=64)
    heights, widths = [65_535, 60_000, 50_000, 100], [65_000, 50_000, 60_000, 50_000]
    expected = placement.assign_many(heights, widths).columns
    for height, width in (
        (np.array(heights, dtype=dtype), widths),
        (heights, np.array(widths, dtype=dtype)),
    ):
        columns = placement.assign_many(height, width).columns
        assert [columns.one(row) for row in range(4)] == [expected.one(row) for row in range(4)]


@pytest.mark.parametrize("crop", ["centre", "top", "random", "focus"])
@pytest.mark.parametrize("small", ["own_bucket", "reject"])
def test_all_columns_are_int64(crop: CropRule, small: SmallRule) -> None:
    placement = rules([256, 512], Fraction(3, 2), 3.0, small, crop)
    placed = placement.assign_many([997, 50, 101], [50, 997, 333], ["a.jpg", "b.jpg", "c.jpg"])
    dtypes = {name: str(column.dtype) for name, column in vars(placed.columns).items()}
    assert dtypes == dict.fromkeys(dtypes, "int64")
    assert (str(placed.too_small.dtype), str(placed.image.dtype)) == ("bool", "int64")


@pytest.mark.parametrize("size", [Size(0, 5), Size(5, 0), Size(MAX_IMAGE_EDGE_PX + 1, 5)], ids=str)
def test_an_impossible_size_is_an_error_that_names_the_image(size: Size) -> None:
    placement = rules([256], None, 3.0)
    heights, widths = [512, size.height], [512, size.width]
    with pytest.raises(BucketError, match=f"got {size} ") as excinfo:
        placement.assign_many(heights, widths, ["photos/a.jpg", "photos/b.jpg"])
    assert excinfo.value.where == "original size of photos/b.jpg"
    with pytest.raises(BucketError) as excinfo:
        placement.assign_many(heights, widths)
    assert excinfo.value.where == "original size"


def test_explicit_sizes_of_the_recipe_are_the_only_buckets() -> None:
    settings = BucketSettings(sizes=("832x1216", "1024x1024"), resolution=512)
    assert placement_of(settings).sizes == (Size(1024, 1024), Size(832, 1216))


def test_every_rule_is_taken_from_the_recipe() -> None:
    settings = BucketSettings(
        resolutions=(512, 256),
        per_image="each",
        step=32,
        max_aspect_ratio=2.351,
        upscale="limit(1.25)",
        small_images="reject",
        crop="random",
        crop_seed=5,
    )
    placement = placement_of(settings)
    ladders = [ladder(each, 32, 2.351) for each in (256, 512)]
    assert [each.sizes for each in placement.sets] == [each.sizes for each in ladders]
    expected = {
        "upscale_limit": Fraction(5, 4),
        "small": "reject",
        "crop": "random",
        "crop_seed": 5,
        "step": 32,
        "max_aspect_ratio": Fraction("2.351"),
        "per_image": "each",
    }
    rules_taken = {name: value for name, value in vars(placement).items() if name != "sets"}
    assert rules_taken == expected
    unchanged = [name for name in expected if getattr(Placement(placement.sets), name) == expected[name]]
    assert unchanged == [], "with a default value, a rule that is not taken would go unnoticed"
