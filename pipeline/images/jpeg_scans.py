"""Count the scans of a JPEG before it is decoded.

A decoder processes all pixels once per scan, and a scan takes only a few bytes: a progressive JPEG of 749 KB
with 65,000 scans can keep a decoder busy for half a minute, and one of 6 MB for an hour.

A JPEG is a list of segments: 0xFF, a marker byte and, for most markers, a length (2, big endian, including
itself) with that many bytes of content. Entropy-coded data follow the segment SOS; in them, 0xFF is always
followed by 0x00 or by a restart marker.
"""

from __future__ import annotations

import io
import mmap
import re
from collections.abc import Iterator
from typing import BinaryIO

from pipeline.images.formats import ImageError

MAX_JPEG_SCANS = 100
"""Maximum number of scans of a JPEG. Encoders write 1 to about 20."""

_SOS, _EOI = 0xDA, 0xD9
_FRAMES = frozenset([*range(0xC0, 0xD0)]) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE_FRAMES = frozenset([0xC2, 0xC6, 0xCA, 0xCE])

_NEXT_SEGMENT = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]", re.DOTALL)
"""The marker of a segment with a length, or of the end; decoders skip everything in front of it too."""

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
    data = _contents(file)
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


def _contents(file: BinaryIO) -> _Data:
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
    """Return one byte; 0 behind the end."""
    return int.from_bytes(data[position : position + 1], "big")
