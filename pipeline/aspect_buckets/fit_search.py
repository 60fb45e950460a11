"""The lists of least cost for every number of sizes at once, by exact dynamic programming.

An image goes to the bucket nearest in log aspect ratio, so images sorted by it fall into runs that end
half-way between neighbouring buckets. What a bucket costs then depends on its two neighbours only through the
ends of its run, and on its number of images modulo the batch size. That is the state: the bucket placed last,
and the remainder of its count up to its own aspect ratio. Each gap between two buckets adds a known cost, and
known counts to the bucket on its left and the one on its right.

A free list is placed from the tallest bucket to the widest. A mirror-symmetric one is placed in pairs from
both ends inwards, with one remainder for each side, until the two meet in the middle.

Letters: N images, C candidates, M places for a bucket or a pair (C or half of them), S sides (1 or 2),
R = b**S remainders of batch size b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.aspect_buckets.fit_cost import WEIGHTS, Dataset, Floats, Weights
from pipeline.images.geometry import Ints, Size

MAX_STATES = 8_000_000
"""Of R * M * M numbers, each of 8 bytes, a few arrays are held at once."""


@dataclass(frozen=True)
class _Gaps:
    """Of each two candidates i left of j: what the images between them cost, and how many go to each.

    Attributes:
        cost: (C, C), meaningful for i < j.
        to_left: (C, C), images between them that go to i.
        to_right: (C, C), those that go to j.
        first_cost: (C,), of all images left of j, if j is the leftmost bucket.
        first_count: (C,)
        last_cost: (C,), of all images right of i, if i is the rightmost bucket.
        last_count: (C,)
    """

    cost: Floats
    to_left: Ints
    to_right: Ints
    first_cost: Floats
    first_count: Ints
    last_cost: Floats
    last_count: Ints


@dataclass(frozen=True)
class _Steps:
    """The search as such: places 0 to M - 1, each chosen place right of the one before.

    Attributes:
        takes: (M,), sizes that a place stands for, 1 or 2.
        start_cost: (M,), if the place is the first one.
        start: (M,), its remainders' code.
        cost: (R, M, M), of going on from one place with given remainders to another; infinite where that is
            not to the right.
        arrival: (M, M), the code of the remainders after it; they depend on the gap alone.
        end_cost: (R, M), of ending there.
    """

    takes: Ints
    start_cost: Floats
    start: Ints
    cost: Floats
    arrival: Ints
    end_cost: Floats


def best_lists(
    dataset: Dataset,
    sizes: Sequence[Size],
    most: int,
    *,
    mirrored: bool,
    weights: Weights = WEIGHTS,
) -> dict[int, tuple[Size, ...]]:
    """For each number of sizes up to `most` the list of least cost among `sizes`.

    Crop loss is taken as 1 - exp(-|log ratio of aspect ratios|), which it is but for the rounding of edges.

    Args:
        dataset: At least one image.
        sizes: Candidates by aspect ratio, each with its transposed.
        most: At least 1.
        mirrored: Whether each size must be there with its transposed.
        weights: Of what is to be least.

    Returns:
        By number of sizes, those numbers for which there is a list; sizes from the tallest to the widest.
    """
    gaps = _gaps(dataset, sizes, weights.upscaled)
    steps_of = _mirrored_steps if mirrored else _free_steps
    steps = steps_of(gaps, dataset.batch_size, weights.partial)
    total, came_from = _search(steps, most)
    found: dict[int, tuple[Size, ...]] = {}
    for number in range(1, most + 1):
        ends = total[number] + steps.end_cost
        code, place = np.unravel_index(int(np.argmin(ends)), ends.shape)
        if np.isfinite(ends[code, place]):
            places = _path(steps, came_from, number, int(code), int(place))
            found[number] = _sizes_at(places, sizes, mirrored=mirrored)
    return found


def num_states(candidates: int, batch_size: int, *, mirrored: bool) -> int:
    """R * M * M, of which time and memory are multiples; keep it below `MAX_STATES`."""
    places = (candidates + 1) // 2 if mirrored else candidates
    return batch_size ** (2 if mirrored else 1) * places**2


def _gaps(dataset: Dataset, sizes: Sequence[Size], upscaled: float) -> _Gaps:
    logs = np.log(dataset.width) - np.log(dataset.height)
    order = np.argsort(logs, kind="stable")
    logs, height, width = logs[order], dataset.height[order], dataset.width[order]
    targets = np.array(sizes, dtype=np.float64)
    places = np.log(targets[:, 1]) - np.log(targets[:, 0])
    middle = np.searchsorted(logs, (places[:, None] + places[None, :]) / 2)
    own = np.searchsorted(logs, places)
    number = len(places)
    left, right = np.zeros((number, number)), np.zeros((number, number))
    first, last = np.zeros(number), np.zeros(number)
    for index, (target_height, target_width) in enumerate(targets):
        enlarged = np.maximum(target_height / height, target_width / width) > 1
        each = 1 - np.exp(-np.abs(logs - places[index])) + upscaled * enlarged
        total = np.concatenate([[0.0], np.cumsum(each)])
        left[index] = total[middle[index]] - total[own[index]]
        right[:, index] = total[own[index]] - total[middle[:, index]]
        first[index] = total[own[index]]
        last[index] = total[-1] - total[own[index]]
    counts = (middle - own[:, None], own[None, :] - middle)
    return _Gaps(left + right, *counts, first, own, last, len(logs) - own)


def _free_steps(gaps: _Gaps, batch: int, weight: float) -> _Steps:
    number = len(gaps.first_cost)
    remainder = np.arange(batch)
    partial = (remainder[:, None, None] + gaps.to_left[None]) % batch
    cost = gaps.cost[None] + weight * partial
    ends = gaps.last_cost[None] + weight * ((remainder[:, None] + gaps.last_count[None]) % batch)
    return _Steps(
        takes=np.ones(number, dtype=np.int64),
        start_cost=gaps.first_cost,
        start=gaps.first_count % batch,
        cost=_rightwards(cost),
        arrival=gaps.to_right % batch,
        end_cost=ends,
    )


def _mirrored_steps(gaps: _Gaps, batch: int, weight: float) -> _Steps:
    """Pairs of a candidate on the tall half and its transposed; the square, if there is one, is alone."""
    number = len(gaps.first_cost)
    half = (number + 1) // 2
    tall, wide = np.arange(half), number - 1 - np.arange(half)
    square = number % 2 == 1
    takes = np.full(half, 2, dtype=np.int64)
    takes[-1] = 1 if square else 2
    codes = np.arange(batch * batch)
    tall_rest, wide_rest = codes % batch, codes // batch
    to_tall, to_wide = gaps.to_left[np.ix_(tall, tall)], gaps.to_right[np.ix_(wide, wide)].T
    partial = (tall_rest[:, None, None] + to_tall[None]) % batch
    partial = partial + (wide_rest[:, None, None] + to_wide[None]) % batch
    between = gaps.cost[np.ix_(tall, tall)] + gaps.cost[np.ix_(wide, wide)].T
    arriving = gaps.to_right[np.ix_(tall, tall)] % batch
    arriving = arriving + gaps.to_left[np.ix_(wide, wide)].T % batch * batch
    return _Steps(
        takes=takes,
        start_cost=gaps.first_cost[tall] + gaps.last_cost[wide],
        start=gaps.first_count[tall] % batch + gaps.last_count[wide] % batch * batch,
        cost=_rightwards(between[None] + weight * partial),
        arrival=arriving,
        end_cost=_meeting(gaps, batch, weight, square=square),
    )


def _meeting(gaps: _Gaps, batch: int, weight: float, *, square: bool) -> Floats:
    """(R, M): of ending with a pair and the images between its two sizes, or with the square."""
    number = len(gaps.first_cost)
    half = (number + 1) // 2
    codes = np.arange(batch * batch)
    tall_rest, wide_rest = codes % batch, codes // batch
    ends = np.full((batch * batch, half), np.inf)
    pairs = np.arange(half - square)
    mates = number - 1 - pairs
    partial = (tall_rest[:, None] + gaps.to_left[pairs, mates][None]) % batch
    partial = partial + (wide_rest[:, None] + gaps.to_right[pairs, mates][None]) % batch
    ends[:, pairs] = gaps.cost[pairs, mates][None] + weight * partial
    if square:
        ends[:, -1] = weight * ((tall_rest + wide_rest) % batch)
    return ends


def _rightwards(cost: Floats) -> Floats:
    place = np.arange(cost.shape[1])
    return np.where(place[:, None] < place[None, :], cost, np.inf)


def _search(steps: _Steps, most: int) -> tuple[Floats, Ints]:
    """Least cost (most + 1, R, M) of reaching a state with so many sizes, and the state before it.

    A state before is coded as place * R + remainders.
    """
    codes, places = steps.end_cost.shape
    total = np.full((most + 1, codes, places), np.inf)
    came_from = np.zeros((most + 1, codes, places), dtype=np.int64)
    for place in range(places):
        if steps.takes[place] <= most:
            total[steps.takes[place], steps.start[place], place] = steps.start_cost[place]
    arrives = [steps.arrival == code for code in range(codes)]
    for number in range(2, most + 1):
        for takes in np.unique(steps.takes):
            if number - takes < 1:
                continue
            reached = total[number - takes][:, :, None] + steps.cost
            before = reached.argmin(axis=0)
            least = np.take_along_axis(reached, before[None], axis=0)[0]
            fitting = (steps.takes == takes)[None, :]
            for code in range(codes):
                here = np.where(arrives[code] & fitting, least, np.inf)
                source = here.argmin(axis=0)
                cost = here[source, np.arange(places)]
                better = cost < total[number, code]
                total[number, code][better] = cost[better]
                state = source * codes + before[source, np.arange(places)]
                came_from[number, code][better] = state[better]
    return total, came_from


def _path(steps: _Steps, came_from: Ints, number: int, code: int, place: int) -> list[int]:
    """The places of the list that ends in the given state with `number` sizes."""
    codes = steps.end_cost.shape[0]
    places = [place]
    while number > steps.takes[place]:
        state = int(came_from[number, code, place])
        number -= int(steps.takes[place])
        place, code = divmod(state, codes)
        places.append(place)
    return places


def _sizes_at(places: Sequence[int], sizes: Sequence[Size], *, mirrored: bool) -> tuple[Size, ...]:
    chosen = {sizes[place] for place in places}
    if mirrored:
        chosen |= {size.transposed for size in chosen}
    return tuple(size for size in sizes if size in chosen)
