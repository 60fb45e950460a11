"""Memory of decoding: how much one image needs, and a budget that all threads of a process share.

The factors were measured with Pillow on images of 16 megapixels: the growth of the process's peak memory.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from PIL import Image

MAX_DECODE_BYTES = 1_000_000_000
"""Default of the recipe's `checks.max_decode_bytes`, and the budget of a process."""

_STORED_BYTES_PER_PX = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}
"""Bytes per pixel that Pillow stores for the modes that need fewer than four."""

_FULL_BYTES_PER_PX = 4

_DECODER_BYTES_PER_PX = {"WEBP": 12, "AVIF": 12, "HEIF": 12, "JXL": 16, "JPEG2000": 16, "TIFF": 8}
"""Bytes per pixel that a decoder needs in addition. The other formats are decoded row by row."""

MAX_BYTES_PER_PX = _FULL_BYTES_PER_PX + max(_DECODER_BYTES_PER_PX.values())
"""Bytes per pixel that any image needs at most."""

_JPEG_COEFFICIENT_BYTES = 2
"""Bytes per pixel and channel of a JPEG in several scans: its coefficients are held until the last scan."""


def decode_bytes(image: Image.Image, *, num_scans: int, converts: bool) -> int:
    """Return an estimate of the memory that decoding an opened image needs at its peak.

    Args:
        image: The image, which need not be loaded.
        num_scans: Number of scans of a JPEG; 1 for other formats.
        converts: Whether the decoded pixels are copied to an image in RGB or in another orientation.
    """
    stored = _STORED_BYTES_PER_PX.get(image.mode, _FULL_BYTES_PER_PX)
    decoder = _DECODER_BYTES_PER_PX.get(str(image.format), 0)
    if num_scans > 1:
        decoder = _JPEG_COEFFICIENT_BYTES * len(image.getbands())

    # The decoder's memory is free again when the pixels are converted.
    return image.width * image.height * (stored + max(decoder, _FULL_BYTES_PER_PX * converts))


class MemoryBudget:
    """A number of bytes that threads reserve for as long as they use them."""

    def __init__(self, num_bytes: int) -> None:
        """Create a budget of which nothing is reserved."""
        self._num_bytes = num_bytes
        self._reserved_bytes = 0
        self._turn = threading.Lock()
        self._released = threading.Condition()

    @contextmanager
    def reserved(self, num_bytes: int) -> Generator[None]:
        """Reserve bytes, after waiting until they are free; more than the budget waits for all other threads.

        A thread must not reserve a second time before it has released the first: two threads that do would
        wait for each other.
        """
        # Later threads wait for their turn, so that many small images cannot delay a large one forever.
        with self._turn, self._released:
            self._released.wait_for(lambda: self._fits(num_bytes))
            self._reserved_bytes += num_bytes
        try:
            yield
        finally:
            with self._released:
                self._reserved_bytes -= num_bytes
                self._released.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        return self._reserved_bytes == 0 or self._reserved_bytes + num_bytes <= self._num_bytes


DECODE_MEMORY = MemoryBudget(MAX_DECODE_BYTES)
"""The budget of this process for scan, validation, thumbnails and encoding."""
