"""Exact search for the lists of least cost, for every number of sizes at once, by dynamic programming.

Images go to the nearest bucket in log aspect ratio. If images are sorted by it, each bucket gets a contiguous
run, and runs end halfway between neighbouring buckets. The cost of a bucket therefore depends on its two
neighbours only, through the ends of its run and through its number of images modulo the batch size. The state
of the search is the bucket placed last and the remainder of its count up to its own aspect ratio. A gap
between two buckets adds a known cost, and known counts to the buckets on its left and right.

A free list is built from the tallest bucket to the widest. A mirror-symmetric list is built in pairs from
both ends inwards, with one remainder per side, until the two sides meet in the middle.

Letters: N images, C candidates, M positions of a bucket or a pair (C or half of that), S sides (1 or 2),
b batch size, R = b**S codes of remainders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.aspect_buckets.fit_cost import WEIGHTS, Dataset, Floats, Weights
from pipeline.images.geometry import Ints, Size

# A few arrays of that many 8-byte numbers are in memory at once.
MAX_STATES = 8_000_000
"""Maximum of R * M * M."""


@dataclass(frozen=True)
class _Gaps:
    """Cost and counts of the images between two neighbouring buckets, for all candidates i left of j.

    Attributes:
        cost: Cost of the images between i and j (C, C); meaningful for i < j.
        to_left: Number of images between i and j that go to i (C, C).
        to_right: Number of images between i and j that go to j (C, C).
        first_cost: Cost of all images left of j, if j is the leftmost bucket (C,).
        first_count: Their number (C,).
        last_cost: Cost of all images right of i, if i is the rightmost bucket (C,).
        last_count: Their number (C,).
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
    """The search as a walk over positions 0 to M - 1, always to the right.

    Attributes:
        num_sizes: Number of sizes at a position, 1 or 2 (M,).
        start_cost: Cost of starting at a position (M,).
        start: Code of the remainders at the start (M,).
        cost: Cost of a step from a position with given remainders to another (R, M, M); infinite to the left.
        arrival: Code of the remainders after a step, which depend on the gap only (M, M).
        end_cost: Cost of ending at a position with given remainders (R, M).
    """

    num_sizes: Ints
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
    """Return the list of least cost for each number of sizes up to `most`; some may have none.

    Args:
        dataset: At least one image.
        sizes: Candidates by aspect ratio from the tallest, each with its transposed.
        most: Maximum number of sizes.
        mirrored: True if each size must come with its transposed.
        weights: Weights of the cost.
    """
    gaps = _gaps(dataset, sizes, weights.upscaled)
    steps_of = _mirrored_steps if mirrored else _free_steps
    steps = steps_of(gaps, dataset.batch_size, weights.partial)
    total, previous = _search(steps, most)

    lists: dict[int, tuple[Size, ...]] = {}
    for number in range(1, most + 1):
        costs = total[number] + steps.end_cost
        code, position = np.unravel_index(int(np.argmin(costs)), costs.shape)
        if np.isfinite(costs[code, position]):
            positions = _path(steps, previous, number, int(code), int(position))
            lists[number] = _sizes_at(positions, sizes, mirrored=mirrored)
    return lists


def num_states(candidates: int, batch_size: int, *, mirrored: bool) -> int:
    """Return R * M * M, which time and memory are proportional to; it must not exceed `MAX_STATES`."""
    positions = (candidates + 1) // 2 if mirrored else candidates
    return batch_size ** (2 if mirrored else 1) * positions**2


def _gaps(dataset: Dataset, sizes: Sequence[Size], upscaled: float) -> _Gaps:
    # Sort the images by log aspect ratio, so that each bucket's images are a slice.
    logs = np.log(dataset.width) - np.log(dataset.height)
    order = np.argsort(logs, kind="stable")
    logs, height, width = logs[order], dataset.height[order], dataset.width[order]

    # Indices into the sorted images: `middle` halfway between two candidates, `own` at a candidate itself.
    targets = np.array(sizes, dtype=np.float64)
    target_logs = np.log(targets[:, 1]) - np.log(targets[:, 0])
    middle = np.searchsorted(logs, (target_logs[:, None] + target_logs[None, :]) / 2)
    own = np.searchsorted(logs, target_logs)

    number = len(target_logs)
    left, right = np.zeros((number, number)), np.zeros((number, number))
    first, last = np.zeros(number), np.zeros(number)
    for index, (target_height, target_width) in enumerate(targets):
        # Cost of each image in this bucket. The crop loss ignores the rounding of edges, so it depends on the
        # aspect ratios only. Cumulative sums give the cost of any slice as a difference.
        is_enlarged = np.maximum(target_height / height, target_width / width) > 1
        image_cost = 1 - np.exp(-np.abs(logs - target_logs[index])) + upscaled * is_enlarged
        cumulative = np.concatenate([[0.0], np.cumsum(image_cost)])

        left[index] = cumulative[middle[index]] - cumulative[own[index]]
        right[:, index] = cumulative[own[index]] - cumulative[middle[:, index]]
        first[index] = cumulative[own[index]]
        last[index] = cumulative[-1] - cumulative[own[index]]

    return _Gaps(
        cost=left + right,
        to_left=middle - own[:, None],
        to_right=own[None, :] - middle,
        first_cost=first,
        first_count=own,
        last_cost=last,
        last_count=len(logs) - own,
    )


def _free_steps(gaps: _Gaps, batch: int, weight: float) -> _Steps:
    number = len(gaps.first_cost)
    remainder = np.arange(batch)

    # A bucket's images are complete when the next bucket is placed; only then is its partial batch known.
    partial = (remainder[:, None, None] + gaps.to_left[None]) % batch
    last_partial = (remainder[:, None] + gaps.last_count[None]) % batch

    return _Steps(
        num_sizes=np.ones(number, dtype=np.int64),
        start_cost=gaps.first_cost,
        start=gaps.first_count % batch,
        cost=_only_rightwards(gaps.cost[None] + weight * partial),
        arrival=gaps.to_right % batch,
        end_cost=gaps.last_cost[None] + weight * last_partial,
    )


def _mirrored_steps(gaps: _Gaps, batch: int, weight: float) -> _Steps:
    """Return the walk over pairs of a tall candidate and its transposed; a square is a pair by itself."""
    number = len(gaps.first_cost)
    half = (number + 1) // 2
    tall, wide = np.arange(half), number - 1 - np.arange(half)
    has_square = number % 2 == 1
    num_sizes = np.full(half, 2, dtype=np.int64)
    if has_square:
        num_sizes[-1] = 1

    # On the wide side the walk goes leftwards, so rows and columns of its gaps are exchanged.
    tall_gaps, wide_gaps = np.ix_(tall, tall), np.ix_(wide, wide)
    to_outer_tall, to_outer_wide = gaps.to_left[tall_gaps], gaps.to_right[wide_gaps].T
    to_inner_tall, to_inner_wide = gaps.to_right[tall_gaps], gaps.to_left[wide_gaps].T
    gap_cost = gaps.cost[tall_gaps] + gaps.cost[wide_gaps].T

    # The outer pair is complete when the inner pair is placed. A code is tall + batch * wide remainder.
    codes = np.arange(batch * batch)
    tall_remainder, wide_remainder = codes % batch, codes // batch
    partial = (tall_remainder[:, None, None] + to_outer_tall[None]) % batch
    partial = partial + (wide_remainder[:, None, None] + to_outer_wide[None]) % batch

    return _Steps(
        num_sizes=num_sizes,
        start_cost=gaps.first_cost[tall] + gaps.last_cost[wide],
        start=gaps.first_count[tall] % batch + gaps.last_count[wide] % batch * batch,
        cost=_only_rightwards(gap_cost[None] + weight * partial),
        arrival=to_inner_tall % batch + to_inner_wide % batch * batch,
        end_cost=_mirrored_end_cost(gaps, batch, weight, has_square=has_square),
    )


def _mirrored_end_cost(gaps: _Gaps, batch: int, weight: float, *, has_square: bool) -> Floats:
    """Return the cost of ending with a pair and the images between its sizes, or with the square (R, M)."""
    number = len(gaps.first_cost)
    half = (number + 1) // 2
    codes = np.arange(batch * batch)
    tall_remainder, wide_remainder = codes % batch, codes // batch
    end_cost = np.full((batch * batch, half), np.inf)

    pairs = np.arange(half - has_square)
    mates = number - 1 - pairs
    partial = (tall_remainder[:, None] + gaps.to_left[pairs, mates][None]) % batch
    partial = partial + (wide_remainder[:, None] + gaps.to_right[pairs, mates][None]) % batch
    end_cost[:, pairs] = gaps.cost[pairs, mates][None] + weight * partial

    # Both sides' remainders belong to the square, which is one bucket.
    if has_square:
        end_cost[:, -1] = weight * ((tall_remainder + wide_remainder) % batch)
    return end_cost


def _only_rightwards(cost: Floats) -> Floats:
    position = np.arange(cost.shape[1])
    return np.where(position[:, None] < position[None, :], cost, np.inf)


def _search(steps: _Steps, most: int) -> tuple[Floats, Ints]:
    """Return the least cost of reaching each state and the state before it, by number of sizes so far."""
    # Both are (most + 1, R, M). A previous state is coded as position * R + remainders.
    num_codes, num_positions = steps.end_cost.shape
    positions = np.arange(num_positions)
    total = np.full((most + 1, num_codes, num_positions), np.inf)
    previous = np.zeros((most + 1, num_codes, num_positions), dtype=np.int64)
    for position in range(num_positions):
        if steps.num_sizes[position] <= most:
            start = (steps.num_sizes[position], steps.start[position], position)
            total[start] = steps.start_cost[position]

    arrives_with = [steps.arrival == code for code in range(num_codes)]
    for number in range(2, most + 1):
        for added in np.unique(steps.num_sizes):
            if number - added < 1:
                continue

            # The remainders after a step depend on the gap only. So the best remainders before the step are
            # chosen once per gap (from, to), and only then are the steps grouped by arrival.
            costs = total[number - added][:, :, None] + steps.cost
            best_code = costs.argmin(axis=0)
            least = np.take_along_axis(costs, best_code[None], axis=0)[0]

            adds_that_many = (steps.num_sizes == added)[None, :]
            for code in range(num_codes):
                arriving = np.where(arrives_with[code] & adds_that_many, least, np.inf)
                source = arriving.argmin(axis=0)
                cost = arriving[source, positions]
                improved = cost < total[number, code]
                total[number, code][improved] = cost[improved]
                state = source * num_codes + best_code[source, positions]
                previous[number, code][improved] = state[improved]
    return total, previous


def _path(steps: _Steps, previous: Ints, number: int, code: int, position: int) -> list[int]:
    num_codes = steps.end_cost.shape[0]
    positions = [position]
    while number > steps.num_sizes[position]:
        state = int(previous[number, code, position])
        number -= int(steps.num_sizes[position])
        position, code = divmod(state, num_codes)
        positions.append(position)
    return positions


def _sizes_at(positions: Sequence[int], sizes: Sequence[Size], *, mirrored: bool) -> tuple[Size, ...]:
    chosen = {sizes[position] for position in positions}
    if mirrored:
        chosen |= {size.transposed for size in chosen}
    return tuple(size for size in sizes if size in chosen)
