"""Latent sizes, size multiples, and the columns of many geometries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BucketError
from pipeline.images.geometry import (
    MAX_BUCKET_EDGE_PX,
    MAX_IMAGE_EDGE_PX,
    Crop,
    Geometry,
    Placement,
    Size,
    ladder,
    latent_size,
    not_multiples,
)

edges = st.integers(1, 40_000)
sizes = st.builds(Size, edges, edges)


def test_B03_sizes_that_the_base_model_does_not_support_are_named() -> None:
    latent = latent_size(Size(576, 1728), 8)
    assert latent == Size(72, 216)
    assert str(latent) == "72x216", "the edges are not integers"
    assert not_multiples([Size(64, 64), Size(64, 72), Size(72, 64)], 16) == [Size(64, 72), Size(72, 64)]
    with pytest.raises(BucketError) as excinfo:
        latent_size(Size(100, 64), 8)
    assert excinfo.value.what == "bucket edges must be multiples of 8 for this base model, got 100x64"


@given(st.lists(sizes, min_size=1, max_size=5))
def test_columns_equal_the_geometries_of_single_images(originals: list[Size]) -> None:
    buckets = ladder(64, 8, 3.0)
    heights, widths = zip(*originals, strict=True)
    many = Placement((buckets,)).assign_many(heights, widths).columns
    for index, _ in enumerate(originals):
        one = many.one(index)
        assert many.scale[index] == one.scale
        assert many.crop_loss[index] == one.crop_loss
        row = {name: int(column[index]) for name, column in vars(many).items()}
        assert Geometry.from_row(row) == one


@pytest.mark.parametrize(
    ("geometry", "box"),
    [
        (Geometry(Size(100, 250), Size(64, 160), Crop(0, 48, 64, 64)), (75.0, 0.0, 175.0, 100.0)),
        (Geometry(Size(250, 100), Size(160, 64), Crop(48, 0, 64, 64)), (0.0, 75.0, 100.0, 175.0)),
        (Geometry(Size(40, 50), Size(160, 200), Crop(96, 120, 64, 80)), (30.0, 24.0, 50.0, 40.0)),
        (Geometry(Size(300, 200), Size(75, 50), Crop(5, 10, 60, 40)), (40.0, 20.0, 200.0, 260.0)),
    ],
    ids=["reduced landscape", "reduced portrait", "enlarged, lower right corner", "cropped on both sides"],
)
def test_the_source_box_is_the_crop_in_original_pixels(
    geometry: Geometry, box: tuple[float, float, float, float]
) -> None:
    """PIL expects left, upper, right, lower."""
    assert geometry.source_box == pytest.approx(box, abs=1e-9)


def test_the_limits_of_edges_are_those_of_jpeg_and_of_32_bits() -> None:
    """A JPEG stores each edge in 16 bits. The longest resized edge is the product of both limits."""
    assert MAX_IMAGE_EDGE_PX == 2**16 - 1
    assert MAX_BUCKET_EDGE_PX == 2**15 - 1
    assert MAX_IMAGE_EDGE_PX * MAX_BUCKET_EDGE_PX < 2**31 <= MAX_IMAGE_EDGE_PX * (MAX_BUCKET_EDGE_PX + 2)
