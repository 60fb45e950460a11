"""Position of the crop within the resized image, for each value of the recipe key `buckets.crop`.

A random crop is seeded by `buckets.crop_seed` and the sample id, and by nothing else. It is the same in every
epoch, because the cached latent shows one crop, which is part of its key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.images.geometry.sizes import Ints

CropRule = Literal["centre", "top", "random", "focus"]
"""Position of the crop: the middle, the upper part, derived from sample id and seed, or around a point."""

# Bits of a random crop's position; multiplied by a difference of edges it stays within 64 bits.
_FRACTION_BITS = 31


def random_corner(
    excess_height: Ints, excess_width: Ints, *, seed: int, names: Iterable[str], image: Ints
) -> tuple[Ints, Ints]:
    """Return top and left of random crops, (M,) each, uniformly distributed over all positions.

    The excesses are the edges of the resized image minus the edges of the target, (M,). `image` is the index
    of each row's image among the N sample ids in `names`.
    """
    fraction = _random_fractions(seed, names)[image]

    # One number suffices: the resized image overlaps the target in one direction only.
    top = (excess_height + 1) * fraction >> _FRACTION_BITS
    left = (excess_width + 1) * fraction >> _FRACTION_BITS
    return top, left


def focus_start(point: npt.NDArray[np.float64] | float, *, resized: Ints, target: Ints) -> Ints:
    """Return the start of the crop of `target` pixels around the pixel at `point` times `resized`.

    For 0.5, the result is a centre crop.
    """
    start = np.floor(point * resized - target / 2).astype(np.int64)
    return np.clip(start, 0, resized - target)


def _random_fractions(seed: int, names: Iterable[str]) -> Ints:
    """Return a number in [0, 2**31) for each sample id."""
    # A file name need not be valid UTF-8; Python then represents its bytes as surrogates.
    key = str(seed).encode()
    numbers = [
        int.from_bytes(
            hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=4, key=key).digest()
        )
        for name in names
    ]
    return np.array(numbers, dtype=np.int64) >> (32 - _FRACTION_BITS)
