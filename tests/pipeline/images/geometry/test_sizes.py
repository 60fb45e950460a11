"""Latent sizes, size multiples, and the columns of many geometries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BucketError
from pipeline.images.geometry import (
    Geometry,
    Placement,
    Size,
    ladder,
    latent_size,
    not_multiples,
    require_multiple,
)

edges = st.integers(1, 40_000)
sizes = st.builds(Size, edges, edges)


def test_B03_sizes_that_the_base_model_does_not_support_are_named() -> None:
    assert latent_size(Size(576, 1728), 8) == Size(72, 216)
    assert not_multiples([Size(64, 64), Size(64, 72), Size(72, 64)], 16) == [Size(64, 72), Size(72, 64)]
    require_multiple([Size(64, 64)], 8)
    with pytest.raises(BucketError, match="must be multiples of 64 for this base model, got 100x64"):
        require_multiple([Size(100, 64)], 64)
    with pytest.raises(BucketError):
        latent_size(Size(100, 64), 8)


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
