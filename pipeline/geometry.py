"""The one geometry: from an image's original size to its bucket, its resized size, its crop and its latent.

    original (oh, ow) --scale to cover--> resized (rh, rw) --centre crop--> target (th, tw) --factor--> latent

Encoder, checks, sampler and micro-conditioning all ask this module. An image's geometry depends on its own
size and the bucket sizes, never on other images or their order. Sizes are computed in integers, so the answer
is the same on every machine, and one image takes the same code as a million.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.errors import BucketError

Ints = npt.NDArray[np.int64]

MAX_IMAGE_EDGE_PX = 65_535
"""Of an original. The longest edge a JPEG can have; with `MAX_BUCKET_EDGE_PX` it keeps every number here
within 64 bits, and every resized size within 32."""

MAX_BUCKET_EDGE_PX = 32_767


class Size(NamedTuple):
    """A height and a width in pixels (or latent cells); PIL's order is the other one."""

    height: int
    width: int

    @property
    def transposed(self) -> Size:
        """Height and width exchanged."""
        return Size(self.width, self.height)

    def __str__(self) -> str:
        """`<height>x<width>`, the name of the bucket of this size."""
        return f"{self.height}x{self.width}"


class Crop(NamedTuple):
    """What is kept of a resized image, in resized pixels from its upper left corner."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Geometry:
    """Where the pixels of one image go.

    Attributes:
        original_size: After EXIF orientation.
        resized_size: After scaling, before the crop; within one pixel of the original's aspect ratio.
        crop: In resized pixels, inside `resized_size`.
    """

    original_size: Size
    resized_size: Size
    crop: Crop

    @property
    def target_size(self) -> Size:
        """After the crop: the bucket's size, what the VAE sees."""
        return Size(self.crop.height, self.crop.width)

    @property
    def bucket(self) -> str:
        """The bucket's name, `<height>x<width>`."""
        return str(self.target_size)

    @property
    def scale(self) -> float:
        """Resized over original, along the edge that decides; above 1 where the image is enlarged."""
        target, original = self.target_size, self.original_size
        return max(target.height / original.height, target.width / original.width)

    @property
    def crop_loss(self) -> float:
        """Share of the resized area that is cut off, in [0, 1)."""
        return 1.0 - _area(self.target_size) / _area(self.resized_size)

    @property
    def source_box(self) -> tuple[float, float, float, float]:
        """The crop in original pixels: left, upper, right, lower, as the `box` of `PIL.Image.resize`.

        Resizing this box to `target_size` gives the pixels of resizing everything and then cropping.
        """
        down = self.original_size.height / self.resized_size.height
        across = self.original_size.width / self.resized_size.width
        bottom, right = self.crop.top + self.crop.height, self.crop.left + self.crop.width
        return (
            self.crop.left * across,
            self.crop.top * down,
            min(right * across, float(self.original_size.width)),
            min(bottom * down, float(self.original_size.height)),
        )

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Geometry:
        """The geometry that a row of aspect_buckets or vae_latents records."""
        return cls(
            Size(row["height"], row["width"]),
            Size(row["resized_height"], row["resized_width"]),
            Crop(row["crop_top"], row["crop_left"], row["target_height"], row["target_width"]),
        )


@dataclass(frozen=True)
class GeometryColumns:
    """The geometry of N images: int64 arrays (N,), named as the columns of the table aspect_buckets."""

    height: Ints
    width: Ints
    resized_height: Ints
    resized_width: Ints
    crop_top: Ints
    crop_left: Ints
    target_height: Ints
    target_width: Ints

    def one(self, index: int) -> Geometry:
        """The geometry of the image at `index`."""
        return Geometry.from_row({name: int(column[index]) for name, column in vars(self).items()})

    @property
    def scale(self) -> npt.NDArray[np.float64]:
        """As `Geometry.scale`, float64 (N,)."""
        return np.maximum(self.target_height / self.height, self.target_width / self.width)

    @property
    def crop_loss(self) -> npt.NDArray[np.float64]:
        """As `Geometry.crop_loss`, float64 (N,)."""
        return 1.0 - (self.target_height * self.target_width) / (self.resized_height * self.resized_width)


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
            largest[aspect_ratio] = max(size, largest.get(aspect_ratio, size), key=_area)
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
        area_gain = [_area(b) - _area(a) for a, b in zip(lower, upper, strict=True)]
        self._area_gain = np.array(area_gain, dtype=np.int64)

    def assign(self, original_size: Size) -> Geometry:
        """The geometry of one image.

        Raises:
            BucketError: An edge is not in 1 to `MAX_IMAGE_EDGE_PX`.
        """
        height, width = np.array([original_size.height]), np.array([original_size.width])
        return self.assign_many(height, width).one(0)

    def assign_many(self, height: npt.ArrayLike, width: npt.ArrayLike) -> GeometryColumns:
        """The geometry of N images, given their original heights and widths in pixels, integers (N,).

        Raises:
            BucketError: An edge is not in 1 to `MAX_IMAGE_EDGE_PX`.
        """
        oh, ow = np.asarray(height, dtype=np.int64), np.asarray(width, dtype=np.int64)
        _require_image_edges(oh, ow)
        nearest = self._nearest(oh, ow)
        th, tw = self._heights[nearest], self._widths[nearest]
        by_width = tw * oh >= th * ow  # the width needs the larger scale, so the height overlaps
        rh = np.where(by_width, _rounded(oh * tw, ow), th)
        rw = np.where(by_width, tw, _rounded(ow * th, oh))
        return GeometryColumns(oh, ow, rh, rw, (rh - th) // 2, (rw - tw) // 2, th, tw)

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
        what = f"resolution {resolution} is not a multiple of step {step}"
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


def latent_size(target_size: Size, factor: int) -> Size:
    """The latent's height and width of a VAE that shrinks each edge by `factor`.

    Raises:
        BucketError: An edge is not a multiple of `factor`.
    """
    require_multiple([target_size], factor)
    return Size(target_size.height // factor, target_size.width // factor)


def not_multiples(sizes: Iterable[Size], multiple: int) -> list[Size]:
    """Those sizes with an edge that `multiple` does not divide, in the order given."""
    return [size for size in sizes if size.height % multiple or size.width % multiple]


def require_multiple(sizes: Iterable[Size], multiple: int) -> None:
    """Nothing, when every edge is a multiple of `multiple`, what the model divides edges by.

    Raises:
        BucketError: Naming the first of the others, and the multiple.
    """
    wrong = not_multiples(sizes, multiple)
    if wrong:
        what = (
            f"{len(wrong)} bucket sizes are not divisible by the model's {multiple}, the first is {wrong[0]}"
        )
        fix = f"set buckets.step to {multiple} or a multiple of it"
        raise BucketError(what, where="buckets.step", fix=fix)


def _rounded(numerator: Ints, denominator: Ints) -> Ints:
    """The quotient of positive numbers, rounded to the nearest integer, halves up."""
    return (2 * numerator + denominator) // (2 * denominator)


def _area(size: Size) -> int:
    return size.height * size.width


def _require_bucket_edges(size: Size) -> None:
    if not (1 <= size.height <= MAX_BUCKET_EDGE_PX and 1 <= size.width <= MAX_BUCKET_EDGE_PX):
        what = f"a bucket of {size} pixels cannot be used"
        fix = f"use edges from 1 to {MAX_BUCKET_EDGE_PX}"
        raise BucketError(what, where="buckets", fix=fix)


def _require_image_edges(height: Ints, width: Ints) -> None:
    wrong = (height < 1) | (width < 1) | (height > MAX_IMAGE_EDGE_PX) | (width > MAX_IMAGE_EDGE_PX)
    if wrong.any():
        at = int(np.argmax(wrong))
        what = f"an image of {int(height[at])}x{int(width[at])} pixels has no geometry"
        fix = f"use images with edges from 1 to {MAX_IMAGE_EDGE_PX} pixels"
        raise BucketError(what, where="original size", fix=fix)
