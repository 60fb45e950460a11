"""Lists of bucket sizes for a dataset, each with what it means for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from pipeline.bucket_fit.cost import LOG_SPACING, Dataset, Trade, candidates, placement_in, trade_of
from pipeline.bucket_fit.search import MAX_STATES, best_lists, num_states
from pipeline.errors import BucketError
from pipeline.geometry import Size


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
    lists = best_lists(dataset, sizes, wanted[-1], mirrored=request.mirrored)
    fits = {
        number: FittedList(found, trade_of(placement_in(found), dataset)) for number, found in lists.items()
    }
    best: dict[int, FittedList] = {}
    for number in wanted:
        possible = [fit for size, fit in fits.items() if size <= number]
        if possible:
            best[number] = min(possible, key=lambda fit: (fit.trade.cost, len(fit.sizes)))
    return best


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
