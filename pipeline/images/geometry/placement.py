"""Which bucket, scale and crop each image gets, by the rules of a recipe.

An image goes to the nearest bucket of a set. Of several sets, one a resolution, it is the one with the
largest sizes that the image fills without being enlarged too much, or each of those that it so fills. What is
too small for all of them gets a bucket of its own size, or none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.errors import BucketError
from pipeline.images.geometry.buckets import Buckets
from pipeline.images.geometry.sizes import (
    MAX_BUCKET_EDGE_PX,
    MAX_IMAGE_EDGE_PX,
    Geometry,
    GeometryColumns,
    Ints,
    Size,
)

Bools = npt.NDArray[np.bool_]

Floats = npt.NDArray[np.float64]

CropRule = Literal["centre", "top", "random", "focus"]
"""What is kept of a resized image that overlaps its bucket: the middle; the upper part; a place that the
sample's name and a seed decide; or what is around a point of the image."""

PerImage = Literal["best", "each"]
"""Whether an image that fills several sets is one sample, of the largest, or one of each."""

SmallRule = Literal["own_bucket", "reject"]
"""What becomes of an image that would be enlarged more than the limit."""


@dataclass(frozen=True)
class Placed:
    """The geometry of N images, in M >= N rows: more than one for an image that is a sample of several sets.

    Attributes:
        columns: M rows; of an image that is too small, what enlarging it would give.
        too_small: Boolean (M,), True for an image that the rules leave out.
        image: Integers (M,), which image the row is of; ascending, from 0.
    """

    columns: GeometryColumns
    too_small: Bools
    image: Ints


@dataclass(frozen=True)
class Placement:
    """The rules of one recipe.

    Attributes:
        sets: Buckets by resolution, the smallest first; at least one.
        upscale_limit: Largest factor by which an image is enlarged; None for any.
        small: For images beyond the limit.
        crop: Where the crop lies.
        crop_seed: Of random crops.
        step: Edges of a bucket of an image's own are multiples of it.
        max_aspect_ratio: And it is no longer than this many times its short edge.
        per_image: What becomes of an image that fills several sets.
    """

    sets: tuple[Buckets, ...]
    upscale_limit: Fraction | None = None
    small: SmallRule = "own_bucket"
    crop: CropRule = "centre"
    crop_seed: int = 0
    step: int = 8
    max_aspect_ratio: Fraction = Fraction(3)
    per_image: PerImage = "best"

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The target sizes of all sets, without those that small images make for themselves."""
        return tuple(dict.fromkeys(size for buckets in self.sets for size in buckets.sizes))

    def assign(self, original_size: Size, name: str = "") -> Geometry | None:
        """The geometry of one image, in the largest set of those that it has; None where it is too small.

        Args:
            original_size: After EXIF orientation.
            name: The sample's id, which decides where a random crop lies.

        Raises:
            BucketError: An edge is not in 1 to `MAX_IMAGE_EDGE_PX`.
        """
        placed = self.assign_many([original_size.height], [original_size.width], [name])
        return None if placed.too_small[-1] else placed.columns.one(-1)

    def assign_many(
        self,
        height: npt.ArrayLike,
        width: npt.ArrayLike,
        names: Iterable[str] | None = None,
        focus: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    ) -> Placed:
        """The geometry of N images.

        Args:
            height: Original heights in pixels, integers (N,).
            width: Original widths, likewise.
            names: The samples' ids; only a random crop asks for them.
            focus: The points that `crop: focus` keeps in view, shares from 0 to 1 of the height, from the
                top, and of the width, from the left, (N,) each; None for the middle.

        Raises:
            BucketError: An edge is not in 1 to `MAX_IMAGE_EDGE_PX`.
        """
        oh, ow = np.asarray(height, dtype=np.int64), np.asarray(width, dtype=np.int64)
        _require_image_edges(oh, ow)
        image, th, tw, too_small = self._targets(oh, ow)
        oh, ow = oh[image], ow[image]
        by_width = tw * oh >= th * ow  # the width needs the larger scale, so the height overlaps
        rh = np.where(by_width, _rounded(oh * tw, ow), th)
        rw = np.where(by_width, tw, _rounded(ow * th, oh))
        if self.crop == "focus":
            down, across = (0.5, 0.5) if focus is None else (np.asarray(each)[image] for each in focus)
            top, left = _around(down, rh, th), _around(across, rw, tw)
        else:
            top, left = self._corner(rh - th, rw - tw, image, names)
        return Placed(GeometryColumns(oh, ow, rh, rw, top, left, th, tw), too_small, image)

    def _targets(self, oh: Ints, ow: Ints) -> tuple[Ints, Ints, Ints, Bools]:
        """Which image each row is of, target heights and widths, and which are too small."""
        if self.per_image == "best" or len(self.sets) == 1:
            return np.arange(len(oh)), *self._best(oh, ow)
        th, tw, too_small = self._best(oh, ow)
        rows = [(th, tw, np.ones(oh.shape, dtype=np.bool_))]
        for buckets in self.sets:
            each_th, each_tw, refused = replace(self, sets=(buckets,), small="reject")._best(oh, ow)
            # Two resolutions may have a size in common, which is one sample.
            new = ~refused
            for before_th, before_tw, used in rows[1:]:
                new &= ~(used & (each_th == before_th) & (each_tw == before_tw))
            rows.append((each_th, each_tw, new))
        # What fills none has the one row of the best, which then is a bucket of its own size.
        fills = np.any([used for _, _, used in rows[1:]], axis=0)
        rows[0] = (th, tw, ~fills)
        heights, widths, used = (np.stack(each, axis=1) for each in zip(*rows, strict=True))
        image, column = np.nonzero(used)
        return image, heights[image, column], widths[image, column], too_small[image]

    def _best(self, oh: Ints, ow: Ints) -> tuple[Ints, Ints, Bools]:
        """Target heights and widths of one row an image, and which are too small.

        Without a limit an image that all sets enlarge goes to the smallest.
        """
        limit = Fraction(1) if self.upscale_limit is None else self.upscale_limit
        th, tw = self.sets[0].nearest(oh, ow)
        fits = _within(th, tw, oh, ow, limit)
        for buckets in self.sets[1:]:
            larger_th, larger_tw = buckets.nearest(oh, ow)
            larger_fits = _within(larger_th, larger_tw, oh, ow, limit)
            th, tw = np.where(larger_fits, larger_th, th), np.where(larger_fits, larger_tw, tw)
            fits = fits | larger_fits
        if self.upscale_limit is None:
            return th, tw, np.zeros(oh.shape, dtype=np.bool_)
        if self.small == "reject":
            return th, tw, ~fits
        own_th, own_tw = self._own(oh, ow, limit)
        possible = (own_th > 0) & (own_tw > 0)
        own = ~fits & possible
        return np.where(own, own_th, th), np.where(own, own_tw, tw), ~fits & ~possible

    def _own(self, oh: Ints, ow: Ints, limit: Fraction) -> tuple[Ints, Ints]:
        """The image's own size times the limit, rounded down to steps and cut to the longest aspect ratio."""
        th = oh * limit.numerator // (limit.denominator * self.step) * self.step
        tw = ow * limit.numerator // (limit.denominator * self.step) * self.step
        ratio = self.max_aspect_ratio
        longest = np.minimum(th, tw) * ratio.numerator // (ratio.denominator * self.step) * self.step
        longest = np.minimum(longest, MAX_BUCKET_EDGE_PX // self.step * self.step)
        return np.minimum(th, longest), np.minimum(tw, longest)

    def _corner(
        self, down: Ints, across: Ints, image: Ints, names: Iterable[str] | None
    ) -> tuple[Ints, Ints]:
        """Top and left of the crop, given by how many pixels the resized image is larger."""
        if self.crop == "centre":
            return down // 2, across // 2
        if self.crop == "top":
            return np.zeros_like(down), across // 2
        assert names is not None, "a random crop depends on the samples' names"
        share = _shares(self.crop_seed, names)[image]
        # One of down and across is 0: a scaled image overlaps its bucket in one direction.
        return (down + 1) * share >> _SHARE_BITS, (across + 1) * share >> _SHARE_BITS


_SHARE_BITS = 31
"""With a difference of edges below 2**31 the product stays within 64 bits."""


def _shares(seed: int, names: Iterable[str]) -> Ints:
    """For each name a number in [0, 2**31) that depends on it and the seed."""
    key = str(seed).encode()
    drawn = [
        int.from_bytes(
            hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=4, key=key).digest()
        )
        for name in names
    ]
    return np.array(drawn, dtype=np.int64) >> (32 - _SHARE_BITS)


def _around(share: Floats | float, resized: Ints, target: Ints) -> Ints:
    """Where a crop of `target` pixels begins whose middle is as near as can be to that share of `resized`.

    A half gives the rounding of `centre`.
    """
    begins = np.floor(share * resized - target / 2).astype(np.int64)
    return np.clip(begins, 0, resized - target)


def _within(th: Ints, tw: Ints, oh: Ints, ow: Ints, limit: Fraction) -> Bools:
    """Whether covering the target enlarges the original by at most the limit."""
    return (th * limit.denominator <= oh * limit.numerator) & (tw * limit.denominator <= ow * limit.numerator)


def _rounded(numerator: Ints, denominator: Ints) -> Ints:
    """The quotient of positive numbers, rounded to the nearest integer, halves up."""
    return (2 * numerator + denominator) // (2 * denominator)


def _require_image_edges(height: Ints, width: Ints) -> None:
    wrong = (height < 1) | (width < 1) | (height > MAX_IMAGE_EDGE_PX) | (width > MAX_IMAGE_EDGE_PX)
    if wrong.any():
        at = int(np.argmax(wrong))
        what = f"an image of {int(height[at])}x{int(width[at])} pixels has no geometry"
        fix = f"use images with edges from 1 to {MAX_IMAGE_EDGE_PX} pixels"
        raise BucketError(what, where="original size", fix=fix)
