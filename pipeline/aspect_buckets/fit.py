"""Lists of bucket sizes for a dataset, each with what it means for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from math import gcd

from pipeline.aspect_buckets.fit_cost import (
    LOG_SPACING,
    WEIGHTS,
    Dataset,
    Trade,
    Weights,
    candidates,
    placement_in,
    trade_of,
)
from pipeline.aspect_buckets.fit_search import MAX_STATES, best_lists, num_states
from pipeline.errors import BucketError
from pipeline.images.geometry import Placement, Size, ladder

LADDER_STEP = 64
"""Of the ladder that a fitted list may not enlarge more images than."""

SEARCHES = (WEIGHTS, *(Weights(upscaled, partial=0.06) for upscaled in (0.05, 0.1, 0.25)))
"""Made in turn, until a list enlarges no more images than that ladder does."""

DEARER = 1.03
"""Of such a list's cost to the least cost."""


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        resolution: Pixel budget, as the edge of a square.
        step: Edges are multiples of it.
        max_aspect_ratio: No size is longer than this many times its short edge.
        mirrored: Whether each size comes with its transposed.
    """

    resolution: int
    step: int
    max_aspect_ratio: float
    mirrored: bool


@dataclass(frozen=True)
class FittedList:
    """Sizes from the tallest to the widest, and what they mean for the dataset they were fitted to."""

    sizes: tuple[Size, ...]
    trade: Trade


def fitted_lists(dataset: Dataset, request: Request, numbers: Iterable[int]) -> dict[int, FittedList]:
    """For each of `numbers` the best list of at most so many sizes.

    The best is the one of least cost. If it enlarges more images than the unfitted ladder of step 64 for the
    same budget, the search is made again with a higher price for that, and a list is taken instead which
    enlarges no more than the ladder and costs at most `DEARER` times as much, if one is met.

    Args:
        dataset: What the sizes are fitted to.
        request: Which sizes come into question.
        numbers: Each at least 1.

    Returns:
        By number; a number is left out where there is no such list.

    Raises:
        BucketError: The dataset is empty, the resolution no multiple of the step, or batches too large.
    """
    wanted = sorted(set(numbers))
    if not len(dataset):
        raise BucketError("there is no image to fit buckets to", where="the dataset", fix="add images")
    sizes = _candidates(dataset, request)
    most_enlarged = trade_of(_ladder(request), dataset).upscaled
    fits: list[FittedList] = []
    best: dict[int, FittedList] = {}
    for weights in SEARCHES:
        lists = best_lists(dataset, sizes, wanted[-1], mirrored=request.mirrored, weights=weights)
        fits += [FittedList(found, trade_of(placement_in(found), dataset)) for found in lists.values()]
        best |= _best_of(fits, wanted, most_enlarged)
        wanted = [number for number in best if best[number].trade.upscaled > most_enlarged]
        if not wanted:
            break
    return dict(sorted(best.items()))


def _best_of(fits: list[FittedList], numbers: list[int], most_enlarged: float) -> dict[int, FittedList]:
    def order(fit: FittedList) -> tuple[float, int]:
        return fit.trade.cost, len(fit.sizes)

    best: dict[int, FittedList] = {}
    for number in numbers:
        possible = [fit for fit in fits if len(fit.sizes) <= number]
        if possible:
            cheapest = min(possible, key=order)
            most = cheapest.trade.cost * DEARER
            affordable = [fit for fit in possible if fit.trade.cost <= most]
            sharp = [fit for fit in affordable if fit.trade.upscaled <= most_enlarged]
            best[number] = min(sharp, key=order, default=cheapest)
    return best


def _ladder(request: Request) -> Placement:
    """Of step 64, or of the multiple of the request's step that its resolution allows."""
    step = max(request.step, gcd(request.resolution, LADDER_STEP))
    return Placement((ladder(request.resolution, step, request.max_aspect_ratio),))


def _candidates(dataset: Dataset, request: Request) -> list[Size]:
    """As close together as the search can take: the larger the batch, the more states each one has."""
    for halvings in count():
        sizes = candidates(
            request.resolution, request.step, request.max_aspect_ratio, spacing=LOG_SPACING * 2**halvings
        )
        if num_states(len(sizes), dataset.batch_size, mirrored=request.mirrored) <= MAX_STATES:
            return sizes
        if len(sizes) <= 2:
            break
    raise BucketError(
        f"batches of {dataset.batch_size} are too large for a mirror-symmetric search",
        where="training.batch_size",
        fix="search for a free list with --free",
    )
