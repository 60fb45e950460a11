"""Limits of decoding: processor time of a header, memory of the pixels, and scans of a JPEG."""

from __future__ import annotations

import io
import mmap
import re
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from PIL import Image

from pipeline.images.formats import ImageError

MAX_DECODE_BYTES = 1_000_000_000
"""Default of the recipe's `checks.max_decode_bytes`, and the budget of a process."""

# The factors below were measured with Pillow on images of 16 megapixels, as the growth of the peak memory of
# the process.

# Pillow stores every other mode with four bytes per pixel, RGB included.
_STORED_BYTES_PER_PX = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}
_FULL_BYTES_PER_PX = 4

# Needed in addition while decoding. Formats that are not listed are decoded row by row.
_DECODER_BYTES_PER_PX = {"WEBP": 12, "AVIF": 12, "HEIF": 12, "JXL": 16, "JPEG2000": 16, "TIFF": 8}

MAX_BYTES_PER_PX = _FULL_BYTES_PER_PX + max(_DECODER_BYTES_PER_PX.values())
"""Bytes per pixel that any image needs at most."""

# Per pixel and channel: the coefficients of a JPEG in several scans are held until the last scan.
_JPEG_COEFFICIENT_BYTES = 2


def decode_bytes(image: Image.Image, *, num_scans: int, converts: bool) -> int:
    """Return an estimate of the memory that decoding an opened image needs at its peak.

    `num_scans` is 1 for formats other than JPEG. `converts` is whether the decoded pixels are copied to an
    image in RGB or in another orientation.
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


class TimedFile:
    """The reading methods of an open file, which fail after some processor time of the reading thread."""

    # Pillow reads a header in many small parts, so a thread that takes too long ends at the next part.

    def __init__(self, file: BinaryIO, max_cpu_s: float) -> None:
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


MAX_JPEG_SCANS = 100
"""Maximum number of scans of a JPEG. Encoders write 1 to about 20."""

# A decoder processes all pixels once per scan, and a scan takes only a few bytes: a progressive JPEG of 749
# KB with 65,000 scans can keep a decoder busy for half a minute, and one of 6 MB for an hour.
#
# A JPEG is a list of segments: 0xFF, a marker byte and, for most markers, a length (2, big endian, including
# itself) with that many bytes of content. Entropy-coded data follow the segment SOS; in them, 0xFF is always
# followed by 0x00 or by a restart marker.

_SOS, _EOI = 0xDA, 0xD9
_FRAMES = frozenset([*range(0xC0, 0xD0)]) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE_FRAMES = frozenset([0xC2, 0xC6, 0xCA, 0xCE])

# The marker of a segment with a length, or of the end; decoders skip everything in front of it too.
_NEXT_SEGMENT = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]", re.DOTALL)

_Data = bytes | mmap.mmap


def require_few_scans(file: BinaryIO) -> int:
    """Return the number of scans of a JPEG.

    Raises:
        ImageError: There are more than `MAX_JPEG_SCANS`.
    """
    num_scans = count_scans(file)
    if num_scans > MAX_JPEG_SCANS:
        detail = f"a JPEG must have at most {MAX_JPEG_SCANS} scans: each repeats the work of decoding"
        raise ImageError("too_many_scans", detail, fix="save it again as a usual JPEG, or remove it")
    return num_scans


def count_scans(file: BinaryIO) -> int:
    """Return the number of scans that a decoder processes, at most `MAX_JPEG_SCANS` + 1.

    The position in the file does not change.
    """
    data = contents(file)
    num_channels, is_progressive, num_scans = 0, False, 0
    for marker, content in _segments(data):
        if marker in _FRAMES:
            num_channels, is_progressive = _byte(data, content + 5), marker in _PROGRESSIVE_FRAMES
        num_scans += marker == _SOS

        # As in libjpeg, the first scan is the only one if it contains all channels of a frame that is not
        # progressive.
        is_first = marker == _SOS and num_scans == 1
        if is_first and not is_progressive and _byte(data, content) >= num_channels:
            break
        if num_scans > MAX_JPEG_SCANS:
            break
    return max(num_scans, 1)  # a decoder reports that there is no scan


def contents(file: BinaryIO) -> _Data:
    """Return the bytes of a file without a change of its position; a local file is mapped, not read."""
    if isinstance(file, io.BytesIO):
        return file.getvalue()
    try:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError, AttributeError):  # a remote file has no descriptor
        position = file.tell()
        file.seek(0)
        data = file.read()
        file.seek(position)
        return data


def _segments(data: _Data) -> Iterator[tuple[int, int]]:
    """Yield the marker of each segment up to the end of the image, and the position of its content."""
    position = 0
    while found := _NEXT_SEGMENT.search(data, position):
        marker, content = data[found.start() + 1], found.end() + 2
        if marker == _EOI:
            return
        yield marker, content
        num_bytes = int.from_bytes(data[content - 2 : content], "big")
        position = max(content, content - 2 + num_bytes)


def _byte(data: _Data, position: int) -> int:
    # A slice behind the end is empty, and the result 0; an index would raise for a truncated file.
    return int.from_bytes(data[position : position + 1], "big")
