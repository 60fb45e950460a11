"""aspect_buckets: the geometry of a million images."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

from bench.measure import Figure, Sides, Workplace, timed
from pipeline.images.geometry import Placement, ladder


@contextmanager
def _many(place: Workplace) -> Generator[Sides]:
    count = 1_000_000
    random = np.random.default_rng(0)
    height, width = random.integers(64, 6000, (2, count))
    buckets = ladder(1024, 64, 3.0)
    placement = Placement((buckets,))
    ratios = np.sort(np.log([size.width / size.height for size in buckets.sizes]))
    edges = (ratios[1:] + ratios[:-1]) / 2

    def limit() -> None:
        np.searchsorted(edges, np.log(width / height))

    yield Sides(count, timed(lambda: placement.assign_many(height, width)), timed(limit))


FIGURES = [
    Figure(
        "geometry",
        "images",
        "bucket, resized size, crop and crop loss of each image",
        "numpy: nearest log aspect ratio",
        None,
        _many,
    )
]
