"""Sizes, crops, and the geometry of one image or of many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.errors import BucketError

Ints = npt.NDArray[np.int64]

MAX_IMAGE_EDGE_PX = 65_535
"""Longest edge of an original image, which is the longest that JPEG supports.

Together with `MAX_BUCKET_EDGE_PX` it keeps every product within 64 bits and every resized size within 32.
"""

MAX_BUCKET_EDGE_PX = 32_767
"""Longest edge of a bucket."""


class Size(NamedTuple):
    """Height and width, in pixels or latent cells; PIL uses the opposite order."""

    height: int
    width: int

    @property
    def transposed(self) -> Size:
        """The size with height and width exchanged."""
        return Size(self.width, self.height)

    def __str__(self) -> str:
        """`<height>x<width>`, the name of the bucket of this size."""
        return f"{self.height}x{self.width}"


class Crop(NamedTuple):
    """The kept part of a resized image, in resized pixels from the upper left corner."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Geometry:
    """The geometry of one image.

    Attributes:
        original_size: Size after EXIF orientation.
        resized_size: Size after scaling and before the crop, within one pixel of the original aspect ratio.
        crop: Crop in resized pixels, inside `resized_size`.
    """

    original_size: Size
    resized_size: Size
    crop: Crop

    @property
    def target_size(self) -> Size:
        """Size after the crop: the bucket's size, which the VAE sees."""
        return Size(self.crop.height, self.crop.width)

    @property
    def bucket(self) -> str:
        """Name of the bucket, `<height>x<width>`."""
        return str(self.target_size)

    @property
    def scale(self) -> float:
        """Scale factor from original to resized; above 1 if the image is enlarged."""
        target, original = self.target_size, self.original_size
        return max(target.height / original.height, target.width / original.width)

    @property
    def crop_loss(self) -> float:
        """Fraction of the resized area that is cropped away, in [0, 1)."""
        return 1.0 - area(self.target_size) / area(self.resized_size)

    @property
    def source_box(self) -> tuple[float, float, float, float]:
        """The crop in original pixels (left, upper, right, lower), the `box` argument of `PIL.Image.resize`.

        Resizing this box to `target_size` is equivalent to resizing the image and cropping afterwards.
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
        """Return the geometry recorded in a row of aspect_buckets or vae_latents."""
        return cls(
            Size(row["height"], row["width"]),
            Size(row["resized_height"], row["resized_width"]),
            Crop(row["crop_top"], row["crop_left"], row["target_height"], row["target_width"]),
        )


@dataclass(frozen=True)
class GeometryColumns:
    """The geometry of N images: int64 arrays (N,), named like the columns of the table aspect_buckets."""

    height: Ints
    width: Ints
    resized_height: Ints
    resized_width: Ints
    crop_top: Ints
    crop_left: Ints
    target_height: Ints
    target_width: Ints

    def one(self, index: int) -> Geometry:
        """Return the geometry of the image at `index`."""
        return Geometry.from_row({name: int(column[index]) for name, column in vars(self).items()})

    @property
    def scale(self) -> npt.NDArray[np.float64]:
        """Scale factors, float64 (N,); see `Geometry.scale`."""
        return np.maximum(self.target_height / self.height, self.target_width / self.width)

    @property
    def crop_loss(self) -> npt.NDArray[np.float64]:
        """Crop losses, float64 (N,); see `Geometry.crop_loss`."""
        return 1.0 - (self.target_height * self.target_width) / (self.resized_height * self.resized_width)


def latent_size(target_size: Size, factor: int) -> Size:
    """Return the latent size of a VAE that divides each edge by `factor`.

    Raises:
        BucketError: An edge is not a multiple of `factor`.
    """
    if not_multiples([target_size], factor):
        what = f"bucket edges must be multiples of {factor} for this base model, got {target_size}"
        fix = f"set buckets.step, or the edges in buckets.sizes, to multiples of {factor}"
        raise BucketError(what, where="buckets", fix=fix)
    return Size(target_size.height // factor, target_size.width // factor)


def not_multiples(sizes: Iterable[Size], multiple: int) -> list[Size]:
    """Return the sizes with an edge that is not a multiple of `multiple`, in the given order."""
    return [size for size in sizes if size.height % multiple or size.width % multiple]


def area(size: Size) -> int:
    """Return the number of pixels."""
    return size.height * size.width
