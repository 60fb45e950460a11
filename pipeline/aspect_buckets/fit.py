"""Fitting of bucket size lists to a dataset."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from math import gcd

from pipeline.aspect_buckets.fit_cost import (
    LOG_SPACING,
    WEIGHTS,
    Dataset,
    FitQuality,
    Weights,
    candidates,
    measure_fit,
    placement_in,
)
from pipeline.aspect_buckets.fit_search import MAX_STATES, best_lists, num_states
from pipeline.errors import BucketError
from pipeline.images.geometry import Placement, Size, ladder

LADDER_STEP = 64
"""Step of the ladder that a fitted list is compared with: it should not enlarge more images."""

SEARCHES = (WEIGHTS, *(Weights(upscaled, partial=0.06) for upscaled in (0.05, 0.1, 0.25)))
"""Weights of successive searches, until a list enlarges no more images than the ladder."""

MAX_COST_RATIO = 1.03
"""A list may cost at most 3% more than the optimum if it enlarges no more images than the ladder."""


@dataclass(frozen=True)
class SizeConstraints:
    """Constraints on the sizes of a list, as in the section `buckets`.

    Attributes:
        mirrored: True if each size must come with its transposed.
    """

    resolution: int
    step: int
    max_aspect_ratio: float
    mirrored: bool


@dataclass(frozen=True)
class FittedList:
    """Sizes from the tallest to the widest, and their consequences for the dataset."""

    sizes: tuple[Size, ...]
    quality: FitQuality


def fitted_lists(
    dataset: Dataset, constraints: SizeConstraints, numbers: Iterable[int]
) -> dict[int, FittedList]:
    """Return the best list with at most that many sizes for each of `numbers`; some may have none.

    A list that enlarges no more images than the ladder of step 64 is preferred to the list of least cost if
    it costs at most `MAX_COST_RATIO` times as much.

    Raises:
        BucketError: The dataset is empty, the resolution is not a multiple of the step, or batches are too
            large for the search.
    """
    if not len(dataset):
        raise BucketError("fitting buckets needs at least one image", where="the dataset", fix="add images")
    sizes = _candidates(dataset, constraints)

    # Users know the ladder's results. A fitted list that enlarges more images would be a step back.
    ladder_upscaled = measure_fit(_ladder(constraints), dataset).upscaled

    pending = sorted(set(numbers))
    fits: list[FittedList] = []
    best: dict[int, FittedList] = {}

    # Each search weighs enlarged images more than the search before it, and the lists of all are compared.
    for weights in SEARCHES:
        lists = best_lists(dataset, sizes, pending[-1], mirrored=constraints.mirrored, weights=weights)
        fits += [FittedList(each, measure_fit(placement_in(each), dataset)) for each in lists.values()]
        best |= _best_of(fits, pending, ladder_upscaled)

        # Only numbers with too many enlarged images are searched again; a search takes seconds.
        pending = [number for number in best if best[number].quality.upscaled > ladder_upscaled]
        if not pending:
            break
    return dict(sorted(best.items()))


def _best_of(fits: list[FittedList], numbers: list[int], max_upscaled: float) -> dict[int, FittedList]:
    # The lists of all searches are compared by the default weights.
    def rank(fit: FittedList) -> tuple[float, int]:
        return fit.quality.cost, len(fit.sizes)

    best: dict[int, FittedList] = {}
    for number in numbers:
        possible = [fit for fit in fits if len(fit.sizes) <= number]
        if not possible:
            continue
        cheapest = min(possible, key=rank)
        max_cost = cheapest.quality.cost * MAX_COST_RATIO
        affordable = [fit for fit in possible if fit.quality.cost <= max_cost]
        sharp = [fit for fit in affordable if fit.quality.upscaled <= max_upscaled]
        best[number] = min(sharp, key=rank, default=cheapest)
    return best


def _ladder(constraints: SizeConstraints) -> Placement:
    """Return the ladder of step 64, or of the next step that the resolution is a multiple of."""
    step = max(constraints.step, gcd(constraints.resolution, LADDER_STEP))
    return Placement((ladder(constraints.resolution, step, constraints.max_aspect_ratio),))


def _candidates(dataset: Dataset, constraints: SizeConstraints) -> list[Size]:
    """Return candidates as closely spaced as the search can handle."""
    # The number of search states grows with the batch size, so large batches get fewer candidates.
    for doublings in count():
        sizes = candidates(
            constraints.resolution,
            constraints.step,
            constraints.max_aspect_ratio,
            spacing=LOG_SPACING * 2**doublings,
        )
        if num_states(len(sizes), dataset.batch_size, mirrored=constraints.mirrored) <= MAX_STATES:
            return sizes
        if len(sizes) <= 2:
            break
    raise BucketError(
        f"batches of {dataset.batch_size} are too large for a mirror-symmetric search",
        where="training.batch_size",
        fix="search for a free list with --free",
    )
