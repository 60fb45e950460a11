"""The words of the geometry: sizes, crops, and where the pixels of one image or of many go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
        return 1.0 - area(self.target_size) / area(self.resized_size)

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


def area(size: Size) -> int:
    """Pixels."""
    return size.height * size.width
