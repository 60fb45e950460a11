"""Sets of target sizes, the ladder of sizes for a resolution, and the nearest size to an image."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from pipeline.errors import BucketError
from pipeline.images.geometry.sizes import MAX_BUCKET_EDGE_PX, Ints, Size, area


class Buckets:
    """A set of target sizes, and the assignment of images to them.

    An image is assigned to the nearest bucket in log aspect ratio, |log(ow / oh) - log(tw / th)|. Ties go to
    the larger area, and then to the wider bucket for landscape and square images and to the taller one for
    portrait images. If several sizes have the same aspect ratio, only the largest is used.

    If the set contains the transposed of each size, transposing an image therefore transposes its geometry.
    The only exception is a square image halfway between a size and its transposed, which goes to the
    landscape bucket.
    """

    def __init__(self, sizes: Iterable[Size]) -> None:
        """Raise BucketError if `sizes` is empty, or an edge is not between 1 and `MAX_BUCKET_EDGE_PX`."""
        largest: dict[Fraction, Size] = {}
        for size in sizes:
            _require_bucket_edges(size)
            aspect_ratio = Fraction(size.width, size.height)
            largest[aspect_ratio] = max(size, largest.get(aspect_ratio, size), key=area)
        if not largest:
            raise BucketError(
                "at least one bucket size is required", where="buckets", fix="set at least one size"
            )
        self.sizes: tuple[Size, ...] = tuple(largest[aspect_ratio] for aspect_ratio in sorted(largest))
        self._heights = np.array([size.height for size in self.sizes], dtype=np.int64)
        self._widths = np.array([size.width for size in self.sizes], dtype=np.int64)
        self._compute_boundaries()

    def _compute_boundaries(self) -> None:
        """Compute the boundary of each two neighbours, the geometric mean of their aspect ratios."""
        # The square of a boundary is the exact fraction `_across` / `_down`, so that ties are found on every
        # machine; the logarithms only find a place to start from.
        lower, upper = self.sizes[:-1], self.sizes[1:]
        self._across = self._widths[:-1] * self._widths[1:]
        self._down = self._heights[:-1] * self._heights[1:]
        self._logs = (np.log(self._across) - np.log(self._down)) / 2
        area_gain = [area(b) - area(a) for a, b in zip(lower, upper, strict=True)]
        self._area_gain = np.array(area_gain, dtype=np.int64)

    def nearest(self, height: Ints, width: Ints) -> tuple[Ints, Ints]:
        """Return (heights, widths) of the bucket with the nearest aspect ratio for each of N images.

        Edges are int64 (N,), at most `MAX_IMAGE_EDGE_PX`: their products must stay within 64 bits.
        """
        index = self._nearest(height, width)
        return self._heights[index], self._widths[index]

    def _nearest(self, oh: Ints, ow: Ints) -> Ints:
        # Rounding of logarithms may cost one bucket; exact integers correct that and decide ties.
        index = np.searchsorted(self._logs, np.log(ow) - np.log(oh)).astype(np.int64)
        while True:
            up = (index < len(self._logs)) & self._above(np.minimum(index, len(self._logs) - 1), oh, ow)
            down = (index > 0) & ~self._above(np.maximum(index - 1, 0), oh, ow)
            if not (up | down).any():
                return index
            index = index + up - down

    def _above(self, boundary: Ints, oh: Ints, ow: Ints) -> npt.NDArray[np.bool_]:
        """Return whether each image is above its given boundary, or on it and goes above in a tie."""
        if not len(self._logs):
            return np.zeros(boundary.shape, dtype=np.bool_)
        excess = ow * ow * self._down[boundary] - oh * oh * self._across[boundary]
        gain = self._area_gain[boundary]
        return (excess > 0) | ((excess == 0) & ((gain > 0) | ((gain == 0) & (ow >= oh))))


def ladder(resolution: int, step: int, max_aspect_ratio: float) -> Buckets:
    """Return the square of `resolution` and, for every other edge, the largest size within its area.

    Every edge is a multiple of `step`, every area is at most resolution squared, every ratio of long to short
    edge is at most `max_aspect_ratio`, and every size comes with its transposed.

    Raises:
        BucketError: `resolution` is not a positive multiple of `step`, or `max_aspect_ratio` is below 1.
    """
    if step < 1:
        what, fix = f"buckets.step must be at least 1, got {step}", "set buckets.step to 64, the default"
        raise BucketError(what, where="buckets.step", fix=fix)

    # The square of the resolution must be one of the sizes.
    if resolution < 1 or resolution % step:
        below = max(resolution // step * step, step)
        raise BucketError(
            f"buckets.resolution must be a multiple of buckets.step ({step}), got {resolution}",
            where="buckets.resolution, buckets.step",
            fix=f"set buckets.resolution to {below} or {below + step}",
        )
    if not max_aspect_ratio >= 1:
        what = f"buckets.max_aspect_ratio must be at least 1, got {max_aspect_ratio}"
        raise BucketError(
            what, where="buckets.max_aspect_ratio", fix="use 1 (squares only) or more, such as 3"
        )

    sizes = {Size(resolution, resolution)}
    for edge in range(step, min(resolution * resolution // step, MAX_BUCKET_EDGE_PX) + 1, step):
        size = Size(edge, min(resolution * resolution // edge // step * step, MAX_BUCKET_EDGE_PX))
        if max(size) <= min(size) * Fraction(max_aspect_ratio):
            sizes |= {size, size.transposed}
    return Buckets(sizes)


def _require_bucket_edges(size: Size) -> None:
    if not (1 <= size.height <= MAX_BUCKET_EDGE_PX and 1 <= size.width <= MAX_BUCKET_EDGE_PX):
        height, width = (min(max(edge, 1), MAX_BUCKET_EDGE_PX) for edge in (size.height, size.width))
        raise BucketError(
            f"both edges of a bucket must be between 1 and {MAX_BUCKET_EDGE_PX} pixels, got {size} "
            "(height x width)",
            where="buckets",
            fix=f"replace {size} by a size within these limits, such as {Size(height, width)}",
        )
