"""Random numbers that depend on what they are for, never on what was drawn before them.

Each draw has a stream of its own, named by the parts that decide it: (seed, "noise", step, slot). So a
resumed run, or one on another number of processes, draws what the uninterrupted one did, in any order.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def hash_bits(num_bits: int, *parts: int | str) -> int:
    """`num_bits` (a multiple of 8, up to 512) that depend on each part and its place; equal everywhere."""
    text = "\0".join(map(str, parts))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=num_bits // 8).digest()
    return int.from_bytes(digest, "big")


def stream(*parts: int | str) -> np.random.Generator:
    """The random numbers named by `parts`: counter-based, so that two streams are as far apart as any two.

    A 128-bit key keeps the streams of a whole run distinct, which the 32 bits that torch's CPU generator
    keeps of its seed would not.
    """
    import numpy as np

    return np.random.Generator(np.random.Philox(key=hash_bits(128, *parts)))
