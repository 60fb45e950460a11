"""Assignment of bucket, scale and crop to images, by the bucket settings of a recipe.

An image goes to the nearest bucket of a set. With several sets, one per resolution, it goes to the largest
one that it fills without being enlarged beyond the limit, or to each such set. An image that is too small for
all sets gets a bucket of its exact size, or is rejected.

Arrays: oh, ow = original height and width; rh, rw = resized; th, tw = target; N images, M >= N rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from pipeline.errors import BucketError
from pipeline.images.geometry.buckets import Buckets, ladder
from pipeline.images.geometry.crops import CropRule, focus_start, random_corner
from pipeline.images.geometry.sizes import (
    MAX_BUCKET_EDGE_PX,
    MAX_IMAGE_EDGE_PX,
    Geometry,
    GeometryColumns,
    Ints,
    Size,
)

if TYPE_CHECKING:
    from pipeline.recipe import BucketSettings, Recipe

Bools = npt.NDArray[np.bool_]

PerImage = Literal["best", "each"]
"""Whether an image that fills several sets is used in the largest one only, or in each."""

SmallRule = Literal["own_bucket", "reject"]
"""Treatment of an image that would have to be enlarged beyond the limit."""


@dataclass(frozen=True)
class Placed:
    """The geometry of N images in M >= N rows; an image used in several sets has several rows.

    Attributes:
        columns: Geometry of M rows; for an image that is too small, the geometry if it were enlarged.
        too_small: Boolean (M,), True for an image to reject.
        image: Index of each row's image (M,), ascending from 0.
    """

    columns: GeometryColumns
    too_small: Bools
    image: Ints


@dataclass(frozen=True)
class Placement:
    """Rules for assigning images to buckets.

    Attributes:
        sets: Buckets of each resolution, smallest first; at least one.
        upscale_limit: Largest factor by which an image may be enlarged; None for any factor.
        small: Treatment of images beyond the limit.
        crop: Position of the crop.
        crop_seed: Seed of random crops.
        step: Edges of an image's own bucket are multiples of this.
        max_aspect_ratio: Largest ratio of long to short edge of an image's own bucket.
        per_image: Treatment of images that fill several sets.
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
        """Target sizes of all sets, without the own buckets of small images."""
        return tuple(dict.fromkeys(size for buckets in self.sets for size in buckets.sizes))

    def assign(self, original_size: Size, name: str = "") -> Geometry | None:
        """Return the geometry of one image in its largest set, or None if the image is too small.

        `name` is the sample id, which decides the position of a random crop. Raises like `assign_many`.
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
        """Return the geometry of N images from their original edges in pixels, integers (N,).

        `names` are sample ids, shown in errors and required for `crop: random` only. `focus` are the points
        (y, x) that `crop: focus` keeps in view, (N,) each, as fractions from the upper left corner; None
        means the middle.

        Raises:
            BucketError: An edge is not between 1 and `MAX_IMAGE_EDGE_PX`.
        """
        oh, ow = np.asarray(height, dtype=np.int64), np.asarray(width, dtype=np.int64)
        _require_image_edges(oh, ow, names)
        image, th, tw, too_small = self._targets(oh, ow)
        oh, ow = oh[image], ow[image]

        # Cover the target: the edge that needs the larger scale fits exactly, and the second edge overlaps.
        width_decides = tw * oh >= th * ow
        rh = np.where(width_decides, _rounded_quotient(oh * tw, ow), th)
        rw = np.where(width_decides, tw, _rounded_quotient(ow * th, oh))

        if self.crop == "random":
            assert names is not None, "a random crop needs the sample ids"
            top, left = random_corner(rh - th, rw - tw, seed=self.crop_seed, names=names, image=image)
        elif self.crop == "focus":
            y, x = (0.5, 0.5) if focus is None else (np.asarray(each)[image] for each in focus)
            top, left = focus_start(y, resized=rh, target=th), focus_start(x, resized=rw, target=tw)
        else:
            left = (rw - tw) // 2
            top = np.zeros_like(rh) if self.crop == "top" else (rh - th) // 2
        return Placed(GeometryColumns(oh, ow, rh, rw, top, left, th, tw), too_small, image)

    def _targets(self, oh: Ints, ow: Ints) -> tuple[Ints, Ints, Ints, Bools]:
        """Return each row's image index, target height, target width, and whether it is too small."""
        th, tw, too_small = self._best_targets(oh, ow)
        if self.per_image == "best" or len(self.sets) == 1:
            return np.arange(len(oh)), th, tw, too_small

        # Each set alone, without own buckets: a set that an image does not fill adds no row.
        candidates: list[tuple[Ints, Ints, Bools]] = []
        for buckets in self.sets:
            only_this_set = replace(self, sets=(buckets,), small="reject")
            set_th, set_tw, not_filled = only_this_set._best_targets(oh, ow)
            used = ~not_filled
            # Two resolutions may share a size, which is one sample.
            for other_th, other_tw, other_used in candidates:
                used &= ~(other_used & (set_th == other_th) & (set_tw == other_tw))
            candidates.append((set_th, set_tw, used))

        # An image that fills no set has a single row, its own bucket or a rejection.
        fills_any = np.any([used for _, _, used in candidates], axis=0)
        candidates.insert(0, (th, tw, ~fills_any))

        heights, widths, used = (np.stack(each, axis=1) for each in zip(*candidates, strict=True))
        image, candidate = np.nonzero(used)
        return image, heights[image, candidate], widths[image, candidate], too_small[image]

    def _best_targets(self, oh: Ints, ow: Ints) -> tuple[Ints, Ints, Bools]:
        # Without a limit, an image that all sets would enlarge goes to the smallest set.
        limit = Fraction(1) if self.upscale_limit is None else self.upscale_limit
        th, tw = self.sets[0].nearest(oh, ow)
        fits = _fits(th, tw, oh, ow, limit)
        for buckets in self.sets[1:]:
            larger_th, larger_tw = buckets.nearest(oh, ow)
            larger_fits = _fits(larger_th, larger_tw, oh, ow, limit)
            th, tw = np.where(larger_fits, larger_th, th), np.where(larger_fits, larger_tw, tw)
            fits = fits | larger_fits

        if self.upscale_limit is None:
            return th, tw, np.zeros(oh.shape, dtype=np.bool_)
        if self.small == "reject":
            return th, tw, ~fits

        # An image smaller than one step cannot have a separate bucket either.
        own_th, own_tw = self._own_bucket(oh, ow, limit)
        exists = (own_th > 0) & (own_tw > 0)
        use_own = ~fits & exists
        return np.where(use_own, own_th, th), np.where(use_own, own_tw, tw), ~fits & ~exists

    def _own_bucket(self, oh: Ints, ow: Ints, limit: Fraction) -> tuple[Ints, Ints]:
        """Return the image's size times the limit, rounded down to steps and to the maximum aspect ratio."""
        th = oh * limit.numerator // (limit.denominator * self.step) * self.step
        tw = ow * limit.numerator // (limit.denominator * self.step) * self.step

        ratio = self.max_aspect_ratio
        longest = np.minimum(th, tw) * ratio.numerator // (ratio.denominator * self.step) * self.step
        longest = np.minimum(longest, MAX_BUCKET_EDGE_PX // self.step * self.step)
        return np.minimum(th, longest), np.minimum(tw, longest)


def placement_of(settings: BucketSettings) -> Placement:
    """Return the rules of a recipe's bucket settings.

    Raises:
        BucketError: The settings allow no bucket.
    """
    if settings.sizes:
        sets = [Buckets(Size(height, width) for height, width in settings.size_pairs)]
    else:
        resolutions = sorted(settings.resolutions or (settings.resolution,))
        sets = [ladder(each, settings.step, settings.max_aspect_ratio) for each in resolutions]
    return Placement(
        sets=tuple(sets),
        upscale_limit=settings.upscale_limit,
        small=settings.small_images,
        crop=settings.crop,
        crop_seed=settings.crop_seed,
        step=settings.step,
        # A recipe's 1.6 means 8/5, not the binary fraction that represents it.
        max_aspect_ratio=Fraction(settings.max_aspect_ratio).limit_denominator(1000),
        per_image=settings.per_image,
    )


def placements_of(recipe: Recipe) -> list[tuple[Placement, list[str]]]:
    """Return the distinct rules for the images of a recipe, each with the names of its datasets.

    Raises:
        BucketError: The settings allow no bucket.
    """
    names: dict[BucketSettings, list[str]] = {}
    for dataset in recipe.datasets:
        names.setdefault(recipe.buckets_of(dataset), []).append(dataset.name)
    return [(placement_of(settings), of_datasets) for settings, of_datasets in names.items()]


def _fits(th: Ints, tw: Ints, oh: Ints, ow: Ints, limit: Fraction) -> Bools:
    # Products instead of quotients, so that the comparison with the limit is exact.
    return (th * limit.denominator <= oh * limit.numerator) & (tw * limit.denominator <= ow * limit.numerator)


def _rounded_quotient(numerator: Ints, denominator: Ints) -> Ints:
    # Halves up, in integers, so that the result is equal on every machine.
    return (2 * numerator + denominator) // (2 * denominator)


def _require_image_edges(height: Ints, width: Ints, names: Iterable[str] | None) -> None:
    invalid = (height < 1) | (width < 1) | (height > MAX_IMAGE_EDGE_PX) | (width > MAX_IMAGE_EDGE_PX)
    if invalid.any():
        index = int(np.argmax(invalid))
        size = f"{int(height[index])}x{int(width[index])}"
        what = f"image edges must be between 1 and {MAX_IMAGE_EDGE_PX} pixels, got {size} (height x width)"
        where = "original size" if names is None else f"original size of {list(names)[index]}"
        raise BucketError(what, where=where, fix="resize the image, or remove it")
