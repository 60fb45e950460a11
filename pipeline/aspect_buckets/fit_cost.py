"""The cost of a list of bucket sizes for a dataset, and the candidate sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.images.geometry import Ints, Placement, Size
from pipeline.images.geometry.buckets import Buckets, ladder

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Weights:
    """Weights of enlarged images and partial batches relative to crop loss, which has weight 1.

    cost = mean crop loss + upscaled * fraction enlarged + partial * fraction in partial batches
    """

    upscaled: float
    partial: float


# Chosen on 20 populations of 500 images. With them, fitted lists of at most 12, 20 and 48 sizes have less
# crop loss and more full batches than ladders of about as many sizes; test_fit.py has the figures.
WEIGHTS = Weights(upscaled=0.025, partial=0.041)
"""Default weights."""

AREA_RANGE = (0.94, 1.03)
"""Smallest and largest area of a candidate, relative to the square of the resolution."""

# Slightly below 1, like the sizes of the ladder, because larger sizes enlarge more images.
PREFERRED_AREA = 0.965
"""Preferred area among candidates with nearly the same aspect ratio, relative to the budget."""

LOG_SPACING = 0.003
"""Distance between candidates in log aspect ratio, if the batch size allows that many."""


@dataclass(frozen=True)
class Dataset:
    """Sizes of the images that buckets are fitted to.

    Attributes:
        height: Original heights, int64 (N,).
        width: Original widths, int64 (N,).
        batch_size: Number of images per batch of all processes.
    """

    height: Ints
    width: Ints
    batch_size: int

    def __len__(self) -> int:
        return len(self.height)


@dataclass(frozen=True)
class FitQuality:
    """Consequences of a list of sizes for a dataset.

    Attributes:
        crop_loss: Mean fraction of an image that is cropped away.
        worst_crop_loss: Largest fraction.
        upscaled: Fraction of the images that are enlarged.
        in_full_batches: Fraction of the samples of an epoch that are in full batches.
        num_buckets: Number of sizes that have images.
    """

    crop_loss: float
    worst_crop_loss: float
    upscaled: float
    in_full_batches: float
    num_buckets: int

    @property
    def cost(self) -> float:
        """Cost with the default weights."""
        partial = 1.0 - self.in_full_batches
        return self.crop_loss + WEIGHTS.upscaled * self.upscaled + WEIGHTS.partial * partial


def measure_fit(placement: Placement, dataset: Dataset) -> FitQuality:
    """Return the consequences of the placement's sizes, measured with the geometry itself."""
    columns = placement.assign_many(dataset.height, dataset.width).columns
    targets = np.stack([columns.target_height, columns.target_width], axis=1)
    _, counts = np.unique(targets, axis=0, return_counts=True)
    num_partial = int((counts % dataset.batch_size).sum())
    return FitQuality(
        crop_loss=float(columns.crop_loss.mean()),
        worst_crop_loss=float(columns.crop_loss.max()),
        upscaled=float((columns.scale > 1).mean()),
        in_full_batches=1.0 - num_partial / len(targets),
        num_buckets=len(counts),
    )


def placement_in(sizes: Sequence[Size]) -> Placement:
    """Return the placement of images in the nearest of `sizes`, with any enlargement."""
    return Placement((Buckets(sizes),))


def candidates(
    resolution: int, step: int, max_aspect_ratio: float, *, spacing: float = LOG_SPACING
) -> list[Size]:
    """Return sizes with edges in multiples of `step` and an area in `AREA_RANGE`, each with its transposed.

    They are in the order of their aspect ratios, from the tallest, at least `spacing` apart in log aspect
    ratio.

    Raises:
        BucketError: `resolution` is not a multiple of `step`.
    """
    budget = resolution * resolution
    longest = int(resolution * np.sqrt(AREA_RANGE[1] * max_aspect_ratio))

    # One landscape size per interval of log aspect ratio: the one with the area closest to the preferred one.
    best: dict[int, tuple[float, Size]] = {}
    for height in range(step, longest + 1, step):
        # The first width with enough area, rounded up to a multiple of the step.
        narrowest = -(-int(np.ceil(AREA_RANGE[0] * budget)) // (height * step)) * step
        for width in range(max(narrowest, height), longest + 1, step):
            if height * width > AREA_RANGE[1] * budget:
                break
            if width > height * max_aspect_ratio:
                continue
            size = Size(height, width)
            interval = _interval(size, spacing)
            choice = (abs(height * width / budget - PREFERRED_AREA), size)
            best[interval] = min(best.get(interval, choice), choice)

    # A large step leaves gaps. The ladder fills them, so that every image has a size near its aspect ratio.
    for size in ladder(resolution, step, max_aspect_ratio).sizes:
        if size.width >= size.height:
            best.setdefault(_interval(size, spacing), (0.0, size))

    # Each size comes with its transposed, because transposing an image must transpose its bucket.
    landscape = {size for _, size in best.values()}
    return sorted(landscape | {size.transposed for size in landscape}, key=_log_aspect_ratio)


def _interval(size: Size, spacing: float) -> int:
    return round(_log_aspect_ratio(size) / spacing)


def _log_aspect_ratio(size: Size) -> float:
    return float(np.log(size.width) - np.log(size.height))
