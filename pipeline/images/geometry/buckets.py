"""Sets of target sizes, the ladder that a resolution makes, and which of its sizes an image is nearest to."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from pipeline.errors import BucketError
from pipeline.images.geometry.sizes import MAX_BUCKET_EDGE_PX, Ints, Size, area


class Buckets:
    """A set of target sizes, and the assignment of images to them.

    An image goes to the bucket nearest in log aspect ratio, |log(ow / oh) - log(tw / th)|. Between two
    equally near ones the larger area wins; between two equally large ones the wider wins for landscape and
    square images and the taller for portrait ones. Of sizes with one aspect ratio only the largest is used.

    So for a set that holds each size with its transposed, transposing an image transposes its geometry. The
    one exception is an exactly square image that lies between a size and its transposed: it goes to the
    landscape one.
    """

    def __init__(self, sizes: Iterable[Size]) -> None:
        """Buckets of the given sizes, in any order, repeated or not.

        Raises:
            BucketError: There is no size, or an edge is not in 1 to `MAX_BUCKET_EDGE_PX`.
        """
        largest: dict[Fraction, Size] = {}
        for size in sizes:
            _require_bucket_edges(size)
            aspect_ratio = Fraction(size.width, size.height)
            largest[aspect_ratio] = max(size, largest.get(aspect_ratio, size), key=area)
        if not largest:
            raise BucketError("there is no bucket", where="buckets", fix="give at least one size")
        self.sizes: tuple[Size, ...] = tuple(largest[aspect_ratio] for aspect_ratio in sorted(largest))
        self._heights = np.array([size.height for size in self.sizes], dtype=np.int64)
        self._widths = np.array([size.width for size in self.sizes], dtype=np.int64)
        self._boundaries()

    def _boundaries(self) -> None:
        """Between neighbours the boundary is the geometric mean of their aspect ratios.

        Its square is kept as a fraction of products of edges (`_across` / `_down`), exactly.
        """
        lower, upper = self.sizes[:-1], self.sizes[1:]
        self._across = self._widths[:-1] * self._widths[1:]
        self._down = self._heights[:-1] * self._heights[1:]
        self._logs = (np.log(self._across) - np.log(self._down)) / 2
        area_gain = [area(b) - area(a) for a, b in zip(lower, upper, strict=True)]
        self._area_gain = np.array(area_gain, dtype=np.int64)

    def nearest(self, height: Ints, width: Ints) -> tuple[Ints, Ints]:
        """(heights, widths) of the buckets of N images with edges in 1 to `MAX_IMAGE_EDGE_PX`."""
        nearest = self._nearest(height, width)
        return self._heights[nearest], self._widths[nearest]

    def _nearest(self, oh: Ints, ow: Ints) -> Ints:
        """Index of each image's bucket: as many boundaries as lie below its aspect ratio.

        Logarithms find it but for rounding; the integers then decide, also at a tie.
        """
        index = np.searchsorted(self._logs, np.log(ow) - np.log(oh)).astype(np.int64)
        while True:
            up = (index < len(self._logs)) & self._above(np.minimum(index, len(self._logs) - 1), oh, ow)
            down = (index > 0) & ~self._above(np.maximum(index - 1, 0), oh, ow)
            if not (up | down).any():
                return index
            index = index + up - down

    def _above(self, boundary: Ints, oh: Ints, ow: Ints) -> npt.NDArray[np.bool_]:
        """Whether each image lies above its given boundary, or on it and belongs above."""
        if not len(self._logs):
            return np.zeros(boundary.shape, dtype=np.bool_)
        excess = ow * ow * self._down[boundary] - oh * oh * self._across[boundary]
        gain = self._area_gain[boundary]
        return (excess > 0) | ((excess == 0) & ((gain > 0) | ((gain == 0) & (ow >= oh))))


def ladder(resolution: int, step: int, max_aspect_ratio: float) -> Buckets:
    """The square of `resolution`, and per shorter or longer edge the largest size within its area.

    Every edge is a multiple of `step`, no area is above resolution squared, no size is longer than
    `max_aspect_ratio` times its short edge, and each size is there with its transposed.

    Raises:
        BucketError: `resolution` is no positive multiple of `step`, or `max_aspect_ratio` is below 1.
    """
    if step < 1 or resolution < 1 or resolution % step:
        what = f"buckets.resolution must be a multiple of buckets.step, got {resolution} and {step}"
        fix = "use a multiple of the step as resolution"
        raise BucketError(what, where="buckets.resolution, buckets.step", fix=fix)
    if not max_aspect_ratio >= 1:
        what = f"max_aspect_ratio {max_aspect_ratio} is below 1"
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
        what = f"a bucket of {size} pixels cannot be used"
        fix = f"use edges from 1 to {MAX_BUCKET_EDGE_PX}"
        raise BucketError(what, where="buckets", fix=fix)
