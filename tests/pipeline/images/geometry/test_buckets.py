"""Bucket assignment: properties for edges from 1 to 40,000 px, and an independent brute-force oracle."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import BucketError
from pipeline.images.geometry import (
    MAX_BUCKET_EDGE_PX,
    MAX_IMAGE_EDGE_PX,
    Buckets,
    Crop,
    Geometry,
    GeometryColumns,
    Placement,
    Size,
    ladder,
)
from pipeline.storage.tables import SCHEMAS

edges = st.integers(1, 40_000)
sizes = st.builds(Size, edges, edges)
bucket_edges = st.integers(1, 4096)
lists = st.lists(st.builds(Size, bucket_edges, bucket_edges), min_size=1, max_size=12)
ladders = st.builds(
    lambda multiple, step, limit: ladder(multiple * step, step, limit),
    st.integers(1, 20),
    st.sampled_from([8, 16, 64]),
    st.floats(1, 5),
)


def place(buckets: Buckets, size: Size) -> Geometry:
    """Return the geometry with the default rules: any enlargement, crop from the centre."""
    geometry = Placement((buckets,)).assign(size)
    assert geometry is not None
    return geometry


def place_many(buckets: Buckets, height: npt.ArrayLike, width: npt.ArrayLike) -> GeometryColumns:
    return Placement((buckets,)).assign_many(height, width).columns


def oracle(size: Size, buckets: Buckets) -> Size:
    """Return the nearest bucket by comparing all of them with exact fractions.

    |log r - log a| is compared by its exponential, max(r / a, a / r).
    """
    ratio = Fraction(size.width, size.height)

    def rank(bucket: Size) -> tuple[Fraction, int, int]:
        aspect = Fraction(bucket.width, bucket.height)
        matching_edge = bucket.width if size.width >= size.height else bucket.height
        return max(ratio / aspect, aspect / ratio), -bucket.height * bucket.width, -matching_edge

    return min(buckets.sizes, key=rank)


def transposed(geometry: Geometry) -> Geometry:
    crop = geometry.crop
    return Geometry(
        geometry.original_size.transposed,
        geometry.resized_size.transposed,
        Crop(crop.left, crop.top, crop.width, crop.height),
    )


def assert_sound(geometry: Geometry) -> None:
    original, resized, target = geometry.original_size, geometry.resized_size, geometry.target_size
    crop = geometry.crop
    assert resized.height >= target.height
    assert resized.width >= target.width
    assert resized.height == target.height or resized.width == target.width
    scale = max(Fraction(target.height, original.height), Fraction(target.width, original.width))
    assert abs(original.height * scale - resized.height) <= Fraction(1, 2)
    assert abs(original.width * scale - resized.width) <= Fraction(1, 2)
    assert 0 <= crop.top <= resized.height - crop.height
    assert 0 <= crop.left <= resized.width - crop.width
    assert resized.height - crop.height - 2 * crop.top in (0, 1)
    assert resized.width - crop.width - 2 * crop.left in (0, 1)
    left, upper, right, lower = geometry.source_box
    assert 0 <= left < right <= original.width
    assert 0 <= upper < lower <= original.height
    assert 0 <= geometry.crop_loss < 1
    assert max(resized) < 2**31


@given(sizes, ladders)
def test_B04_resized_covers_the_target_within_a_pixel_and_the_crop_is_central(
    size: Size, buckets: Buckets
) -> None:
    assert_sound(place(buckets, size))


@given(sizes, lists)
def test_any_list_of_sizes_gives_the_oracles_bucket(size: Size, targets: list[Size]) -> None:
    buckets = Buckets(targets)
    geometry = place(buckets, size)
    assert_sound(geometry)
    assert geometry.target_size == oracle(size, buckets)


@given(sizes, ladders)
def test_B06_transposing_an_image_transposes_its_geometry(size: Size, buckets: Buckets) -> None:
    if size.height == size.width:
        assert place(buckets, size).target_size == place(buckets, Size(1, 1)).target_size
    else:
        assert place(buckets, size.transposed) == transposed(place(buckets, size))


@given(sizes, lists)
def test_B06_transposing_an_image_transposes_its_geometry_for_any_symmetric_list(
    size: Size, targets: list[Size]
) -> None:
    buckets = Buckets([*targets, *(target.transposed for target in targets)])
    if size.height != size.width:
        assert place(buckets, size.transposed) == transposed(place(buckets, size))


@given(st.lists(sizes, min_size=1, max_size=30), lists, st.randoms())
def test_B06_other_images_their_order_and_the_order_of_sizes_do_not_matter(
    originals: list[Size], targets: list[Size], random: object
) -> None:
    single_geometries = [place(Buckets(targets), size) for size in originals]
    many = place_many(Buckets(reversed(targets)), [s.height for s in originals], [s.width for s in originals])
    assert [many.one(index) for index in range(len(originals))] == single_geometries


def test_the_oracle_agrees_on_10_000_images() -> None:
    random = np.random.default_rng(7)
    for buckets, count in ((ladder(1024, 64, 3.0), 8_000), (ladder(256, 16, 4.0), 2_000)):
        height, width = random.integers(1, 40_000, (2, count))
        many = place_many(buckets, height, width)
        for index, (h, w) in enumerate(zip(height.tolist(), width.tolist(), strict=True)):
            expected = oracle(Size(h, w), buckets)
            assert (many.target_height[index], many.target_width[index]) == expected


@pytest.mark.parametrize(
    ("size", "targets", "expected"),
    [
        (Size(100, 200), [Size(1024, 1024), Size(512, 2048)], Size(512, 2048)),
        (Size(200, 100), [Size(1024, 1024), Size(2048, 512)], Size(2048, 512)),
        (Size(100, 200), [Size(1024, 1024), Size(256, 1024)], Size(1024, 1024)),
        (Size(100, 200), [Size(512, 512), Size(512, 2048)], Size(512, 2048)),
        (Size(200, 100), [Size(512, 512), Size(2048, 512)], Size(2048, 512)),
        (Size(200, 100), [Size(1024, 1024), Size(1024, 256)], Size(1024, 1024)),
        (Size(50, 50), [Size(512, 1024), Size(1024, 512)], Size(512, 1024)),
        (Size(50, 50), [Size(512, 1024), Size(1032, 516)], Size(1032, 516)),
        (Size(1, 2), [Size(512, 1024), Size(1024, 2048)], Size(1024, 2048)),
        # Rounded logarithms place these two images above the boundary; exact integers move them down.
        (Size(200, 100), [Size(256, 64), Size(64, 64)], Size(256, 64)),
        (Size(200, 100), [Size(2048, 64), Size(256, 64), Size(64, 64)], Size(256, 64)),
        # The smallest possible distance from a boundary: 1 * 1 * 3 - 1 * 1 * 2 = 1.
        (Size(1, 1), [Size(3, 1), Size(1, 2)], Size(1, 2)),
    ],
    ids=str,
)
def test_ties_go_to_the_larger_area_then_to_the_images_own_orientation(
    size: Size, targets: list[Size], expected: Size
) -> None:
    assert place(Buckets(targets), size).target_size == expected


@settings(max_examples=30)
@given(st.integers(1, 32), st.sampled_from([8, 16, 32, 64]), st.floats(1, 4))
def test_the_ladder_respects_budget_step_and_aspect_ratio(multiple: int, step: int, limit: float) -> None:
    resolution = multiple * step
    sizes = ladder(resolution, step, limit).sizes
    assert Size(resolution, resolution) in sizes
    assert {size.transposed for size in sizes} == set(sizes)
    for size in sizes:
        assert size.height % step == size.width % step == 0
        assert size.height * size.width <= resolution**2
        assert max(size) <= min(size) * Fraction(limit)


@pytest.mark.parametrize(
    ("resolution", "step", "limit"),
    [(2, 1, 4.0), (5, 1, 2.5), (24, 8, 9.0), (256, 64, 3.0), (1024, 64, 2.4), (960, 96, 5.5)],
)
def test_the_ladder_has_the_largest_size_of_each_edge(resolution: int, step: int, limit: float) -> None:
    """The oracle tries every pair of edges; of sizes with the same aspect ratio, the largest counts."""
    steps = range(step, resolution**2 // step + 1, step)
    every = [Size(h, w) for h in steps for w in steps if h * w <= resolution**2]
    largest = {size.height: size for size in sorted(every)}.values()
    allowed = [size for size in largest if max(size) <= Fraction(limit) * min(size)]
    symmetric = [Size(resolution, resolution), *allowed, *(size.transposed for size in allowed)]
    by_ratio = {Fraction(*size): size for size in sorted(symmetric)}
    assert set(ladder(resolution, step, limit).sizes) == set(by_ratio.values())


def test_the_ladder_of_a_huge_resolution_stops_at_the_longest_edge() -> None:
    """16384 * 16384 pixels allow an edge of 32768 pixels, one more than a bucket may have."""
    sizes = ladder(16384, 8192, 4.0).sizes
    assert max(max(size) for size in sizes) <= MAX_BUCKET_EDGE_PX


@pytest.mark.parametrize(
    ("size", "bucket"),
    [(Size(3000, 3072), "1024x1024"), (Size(48, 48), "1024x1024"), (Size(1, 60000), "576x1728")],
    ids=str,
)
def test_B05_extreme_sizes_get_a_bucket(size: Size, bucket: str) -> None:
    assert place(ladder(1024, 64, 3.0), size).bucket == bucket


def test_the_step_64_ladder_keeps_its_measured_crop_loss_and_full_batches() -> None:
    losses, full = [], []
    for seed in range(20):
        random = np.random.default_rng(seed)
        aspect = np.exp(random.uniform(np.log(0.4), np.log(2.5), 500))
        pixels = np.exp(random.uniform(np.log(0.3e6), np.log(12e6), 500))
        columns = place_many(ladder(1024, 64, 3.0), np.sqrt(pixels / aspect), np.sqrt(pixels * aspect))
        counts = np.unique(columns.target_width, return_counts=True)[1]
        losses.append(columns.crop_loss.mean())
        full.append((counts // 4 * 4).sum() / 500)
    assert max(losses) <= 0.0315
    assert min(full) >= 0.92


def test_the_largest_image_and_bucket_fit_the_integers_of_the_table() -> None:
    assert SCHEMAS["aspect_buckets"]["resized_width"] == pl.Int32
    buckets = Buckets([Size(MAX_BUCKET_EDGE_PX, 1), Size(MAX_BUCKET_EDGE_PX, MAX_BUCKET_EDGE_PX)])
    assert_sound(place(buckets, Size(1, MAX_IMAGE_EDGE_PX)))
    assert_sound(place(buckets, Size(MAX_IMAGE_EDGE_PX, MAX_IMAGE_EDGE_PX - 1)))


@pytest.mark.parametrize(
    "size", [Size(0, 5), Size(5, 0), Size(-1, 5), Size(5, MAX_IMAGE_EDGE_PX + 1)], ids=str
)
def test_B05_an_image_with_impossible_edges_is_an_error(size: Size) -> None:
    with pytest.raises(BucketError, match=f"got {size}"):
        place(ladder(64, 8, 3.0), size)


def test_buckets_without_a_size_are_an_error() -> None:
    with pytest.raises(BucketError, match="at least one bucket size is required"):
        Buckets([])


@pytest.mark.parametrize(
    ("size", "possible"),
    [
        (Size(0, 8), Size(1, 8)),
        (Size(8, 0), Size(8, 1)),
        (Size(-5, 0), Size(1, 1)),
        (Size(MAX_BUCKET_EDGE_PX + 1, 8), Size(MAX_BUCKET_EDGE_PX, 8)),
        (Size(8, MAX_BUCKET_EDGE_PX + 1), Size(8, MAX_BUCKET_EDGE_PX)),
    ],
    ids=str,
)
def test_an_impossible_bucket_edge_is_an_error_that_names_a_possible_one(size: Size, possible: Size) -> None:
    with pytest.raises(BucketError, match=f"got {size} ") as excinfo:
        Buckets([size])
    assert excinfo.value.fix == f"replace {size} by a size within these limits, such as {possible}"
    assert Buckets([possible]).sizes == (possible,)


@pytest.mark.parametrize(
    ("resolution", "step", "limit", "where"),
    [
        (1000, 64, 3.0, "buckets.resolution, buckets.step"),
        (0, 8, 3.0, "buckets.resolution, buckets.step"),
        (-8, 8, 3.0, "buckets.resolution, buckets.step"),
        (64, 0, 3.0, "buckets.step"),
        (64, -8, 3.0, "buckets.step"),
        (64, 8, 0.99, "buckets.max_aspect_ratio"),
        (64, 8, float("nan"), "buckets.max_aspect_ratio"),
    ],
)
def test_an_impossible_ladder_is_an_error_that_names_its_settings(
    resolution: int, step: int, limit: float, where: str
) -> None:
    with pytest.raises(BucketError) as excinfo:
        ladder(resolution, step, limit)
    assert excinfo.value.where == where


@pytest.mark.parametrize(
    ("resolution", "step", "resolutions"),
    [(1000, 64, "960 or 1024"), (100, 8, "96 or 104"), (7, 8, "8 or 16"), (-9, 8, "8 or 16")],
)
def test_an_impossible_resolution_is_an_error_that_names_the_nearest_multiples(
    resolution: int, step: int, resolutions: str
) -> None:
    with pytest.raises(BucketError) as excinfo:
        ladder(resolution, step, 3.0)
    assert excinfo.value.fix == f"set buckets.resolution to {resolutions}"


def test_a_step_of_one_pixel_and_a_single_shape_are_possible() -> None:
    assert ladder(1, 1, 1.0).sizes == (Size(1, 1),)
    assert set(ladder(2, 1, 3.0).sizes) == {Size(1, 3), Size(2, 2), Size(3, 1)}
