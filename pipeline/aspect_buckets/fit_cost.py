"""What a list of bucket sizes costs a dataset, and the sizes that come into question."""

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
    """What enlarged images and unfilled batches count beside crop loss, which weighs 1.

        cost = mean crop loss + upscaled * share enlarged + partial * share in partial batches

    Attributes:
        upscaled: At least 0.
        partial: At least 0.
    """

    upscaled: float
    partial: float


WEIGHTS = Weights(upscaled=0.025, partial=0.041)
"""Chosen on 20 populations of 500 images, such that lists of up to 12, 20 and 48 sizes were ahead of every
ladder in crop loss and in full batches at once (tests/pipeline/aspect_buckets/test_fit_population.py)."""

AREA_RANGE = (0.94, 1.03)
"""Of a candidate's area, as a share of the square of the resolution."""

PREFERRED_AREA = 0.965
"""Of candidates with nearly one aspect ratio, the one nearest to this share of the budget is kept: slightly
below 1, as the ladder's, because larger ones enlarge more images."""

LOG_SPACING = 0.003
"""Between candidates, in log aspect ratio, where the batch size allows it."""


@dataclass(frozen=True)
class Dataset:
    """The sizes of the images that buckets are fitted to.

    Attributes:
        height: Original heights, int64 (N,).
        width: Original widths, likewise.
        batch_size: Images that all processes take at once.
    """

    height: Ints
    width: Ints
    batch_size: int

    def __len__(self) -> int:
        """N."""
        return len(self.height)


@dataclass(frozen=True)
class Trade:
    """What a list of sizes means for a dataset.

    Attributes:
        crop_loss: Mean share of an image that is cut off.
        worst_crop_loss: The largest.
        upscaled: Share of the images that are enlarged.
        in_full_batches: Share of the samples that meet in full batches, over one epoch.
        num_buckets: Sizes that have images.
    """

    crop_loss: float
    worst_crop_loss: float
    upscaled: float
    in_full_batches: float
    num_buckets: int

    @property
    def cost(self) -> float:
        """By `WEIGHTS`."""
        partial = 1.0 - self.in_full_batches
        return self.crop_loss + WEIGHTS.upscaled * self.upscaled + WEIGHTS.partial * partial


def trade_of(placement: Placement, dataset: Dataset) -> Trade:
    """What the sizes of `placement` mean for the dataset, by the geometry itself."""
    columns = placement.assign_many(dataset.height, dataset.width).columns
    targets = np.stack([columns.target_height, columns.target_width], axis=1)
    _, counts = np.unique(targets, axis=0, return_counts=True)
    partial = int((counts % dataset.batch_size).sum())
    return Trade(
        crop_loss=float(columns.crop_loss.mean()),
        worst_crop_loss=float(columns.crop_loss.max()),
        upscaled=float((columns.scale > 1).mean()),
        in_full_batches=1.0 - partial / len(targets),
        num_buckets=len(counts),
    )


def placement_in(sizes: Sequence[Size]) -> Placement:
    """Images put into the nearest of `sizes`, enlarged as it takes."""
    return Placement((Buckets(sizes),))


def candidates(
    resolution: int, step: int, max_aspect_ratio: float, *, spacing: float = LOG_SPACING
) -> list[Size]:
    """Sizes with edges in multiples of `step` and an area in `AREA_RANGE`, each with its transposed.

    Where steps are so coarse that there is none, the ladder's size of that shape stands in.

    Args:
        resolution: Edge of the square that is the budget, in pixels; a multiple of `step`.
        step: In pixels.
        max_aspect_ratio: At least 1.
        spacing: Of two sizes nearer than this in log aspect ratio one is left out.

    Returns:
        By aspect ratio, from the tallest; no two with one aspect ratio.

    Raises:
        BucketError: `resolution` is no multiple of `step`.
    """
    budget = resolution * resolution
    longest = int(resolution * np.sqrt(AREA_RANGE[1] * max_aspect_ratio))
    best: dict[int, tuple[float, Size]] = {}
    for height in range(step, longest + 1, step):
        narrowest = -(-int(np.ceil(AREA_RANGE[0] * budget)) // (height * step)) * step
        for width in range(max(narrowest, height), longest + 1, step):
            if height * width > AREA_RANGE[1] * budget:
                break
            if width > height * max_aspect_ratio:
                continue
            size = Size(height, width)
            place = _place(size, spacing)
            choice = (abs(height * width / budget - PREFERRED_AREA), size)
            best[place] = min(best.get(place, choice), choice)
    for size in ladder(resolution, step, max_aspect_ratio).sizes:
        if size.width >= size.height:
            best.setdefault(_place(size, spacing), (0.0, size))
    wide = {size for _, size in best.values()}
    return sorted(wide | {size.transposed for size in wide}, key=_log_aspect_ratio)


def _place(size: Size, spacing: float) -> int:
    return round(_log_aspect_ratio(size) / spacing)


def _log_aspect_ratio(size: Size) -> float:
    return float(np.log(size.width) - np.log(size.height))
