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
from typing import BinaryIO, NamedTuple

from pipeline.images.formats import ImageError

MAX_JPEG_SCANS = 100
"""Maximum number of scans of a JPEG. Encoders write 1 to about 20."""

_SOS, _EOI = 0xDA, 0xD9
_WITHOUT_LENGTH = frozenset([0x01, *range(0xD0, 0xD9)])
_FRAMES = frozenset([*range(0xC0, 0xD0)]) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE_FRAMES = frozenset([0xC2, 0xC6, 0xCA, 0xCE])

_SOS_MARKER = b"\xff\xda"
_NEXT_SEGMENT = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]", re.DOTALL)

_Data = bytes | mmap.mmap


class _FirstScan(NamedTuple):
    """Position of the first scan's segment, and whether further scans may follow it."""

    position: int
    is_one_of_several: bool


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
    first = _first_scan(data)
    if first is None or not first.is_one_of_several:
        return 1

    # Searching two bytes is much faster than parsing. Data behind the image can only increase the number.
    num_markers, position = 0, first.position
    while num_markers <= MAX_JPEG_SCANS and (position := data.find(_SOS_MARKER, position)) >= 0:
        num_markers += 1
        position += 2
    return num_markers if num_markers <= MAX_JPEG_SCANS else _parsed_scans(data, first.position)


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


def _first_scan(data: _Data) -> _FirstScan | None:
    """Return the first scan; None if there is none, and the decoder will report that.

    As in libjpeg, there are several scans if the image is progressive, or if the first scan does not contain
    all channels.
    """
    position, num_channels, is_progressive = 2, 0, False
    while position + 4 <= len(data):
        if data[position] != 0xFF:
            position += 1  # decoders skip such bytes too
            continue
        marker = data[position + 1]
        if marker == 0xFF or marker in _WITHOUT_LENGTH or marker == 0:
            position += 1 if marker == 0xFF else 2
            continue

        content = position + 4
        if marker == _EOI:
            return None
        if marker == _SOS:
            num_in_scan = data[content] if content < len(data) else 0
            return _FirstScan(position, is_progressive or num_in_scan < num_channels)
        if marker in _FRAMES and content + 6 <= len(data):
            num_channels, is_progressive = data[content + 5], marker in _PROGRESSIVE_FRAMES
        position += 2 + max(2, int.from_bytes(data[position + 2 : position + 4], "big"))
    return None


def _parsed_scans(data: _Data, position: int) -> int:
    """Return the number of scans from the first one to the end of the image, at most one above the limit."""
    num_scans = 0
    while num_scans <= MAX_JPEG_SCANS and (found := _NEXT_SEGMENT.search(data, position)):
        position, marker = found.start(), data[found.start() + 1]
        if marker == _EOI:
            break
        num_scans += marker == _SOS
        position += 2 + max(2, int.from_bytes(data[position + 2 : position + 4], "big"))
    return num_scans
