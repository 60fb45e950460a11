"""A file that can be read for a limited processor time.

Pillow reads a header in many small parts, so a thread that takes too long can be stopped at the next part.
"""

from __future__ import annotations

import time
from typing import BinaryIO

from pipeline.images.formats import ImageError


class TimedFile:
    """The reading methods of an open file, which fail after some processor time of the reading thread."""

    def __init__(self, file: BinaryIO, max_cpu_s: float) -> None:
        """Start to measure."""
        self._file = file
        self._max_cpu_s = max_cpu_s
        self._end_s = time.thread_time() + max_cpu_s
        self.seek, self.tell = file.seek, file.tell

    def read(self, num_bytes: int = -1) -> bytes:
        """Return the next bytes.

        Raises:
            ImageError: The time is up (`too_slow`).
        """
        if time.thread_time() > self._end_s:
            detail = f"reading its header took more than {self._max_cpu_s:g} s of processor time"
            raise ImageError("too_slow", detail, fix="save the image again without metadata, or remove it")
        return self._file.read(num_bytes)
