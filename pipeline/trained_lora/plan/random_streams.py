"""Random numbers that depend on their purpose, never on earlier draws.

Each draw has its own stream, named by the parts that decide it, such as (seed, "noise", step, slot). A
resumed run, or a run on another number of processes, therefore draws the same numbers in any order.

Random crops belong to an image's geometry; see `pipeline.images.geometry.crops`.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def hash_bits(num_bits: int, *parts: int | str) -> int:
    """Hash the parts, in order, to `num_bits` bits (a multiple of 8, up to 512), equal on every machine."""
    # Names of files may have bytes that are not UTF-8 (FAILURES I18).
    text = "\0".join(map(str, parts))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=num_bits // 8).digest()
    return int.from_bytes(digest, "big")


def stream(*parts: int | str) -> np.random.Generator:
    """Return the counter-based random generator that is named by `parts`."""
    import numpy as np

    # A key of 128 bits keeps all streams of a run distinct. Torch's CPU generator uses only 32 bits of its
    # seed.
    return np.random.Generator(np.random.Philox(key=hash_bits(128, *parts)))
