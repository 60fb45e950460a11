"""The boxes of an AVIF, and the sizes of its AV1 pictures, which decoders do not compare with the boxes.

A box is size (4 bytes, big endian, including itself), type (4), content. "meta" contains the primary item
("pitm"), where the data of items are ("iloc"), the tiles of a grid ("iref/dimg"), all properties
("iprp/ipco") and which items have them ("iprp/ipma"). The boxes of an animation are in "moov/trak". Sources:
ISO/IEC 14496-12 and 23008-12, https://aomediacodec.github.io/av1-avif/, and sections 5.5 and 5.9 of
https://aomediacodec.github.io/av1-spec/.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, NoReturn

from pipeline.images.formats import ImageError

_MAX_UNITS = 100_000
"""Largest number of units (OBU) in the AV1 pictures of a file; a picture has about three."""

_MAX_TILE_PADDING_PX = 63
"""Tiles are multiples of 64 pixels long (MIAF), and the grid's canvas may end inside the last one."""

_SEQUENCE_HEADER = 1
"""Type of the unit with the largest size of a picture."""

_FRAME_HEADERS = frozenset([3, 6, 7])
"""Types of the units that begin with the header of a frame."""

_KEY_FRAME, _SWITCH_FRAME = 0, 3

_CHOSEN_BY_FRAME = 2
"""Value of a setting of the sequence that each frame header contains."""

_DAMAGE = (KeyError, IndexError, struct.error)
"""Errors of damaged boxes, which decoding reports."""

_Bytes = bytes | memoryview
_SizeWh = tuple[int, int]


def boxes(data: _Bytes, *, is_file: bool = False) -> Iterator[tuple[bytes, _Bytes]]:
    """Yield type and content of each box; only the last one of a file may have size 0, up to its end."""
    position = 0
    while position + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, position)
        header_bytes = 8
        if size == 0 and is_file:
            size = len(data) - position
        elif size == 1:
            (size,) = struct.unpack_from(">Q", data, position + 8)
            header_bytes = 16
        if size < header_bytes:
            return
        yield kind, data[position + header_bytes : position + size]
        position += size


def properties_by_item(ipma: _Bytes) -> Iterator[tuple[int, int]]:
    """Yield each item with each of its properties, counted from 1."""
    item_format = ">IB" if ipma[0] else ">HB"
    index_bytes = 2 if ipma[3] & 1 else 1
    (num_items,) = struct.unpack_from(">I", ipma, 4)
    position = 8
    for _ in range(num_items):
        item, num_properties = struct.unpack_from(item_format, ipma, position)
        position += struct.calcsize(item_format)
        for _ in range(num_properties):
            index = int.from_bytes(ipma[position : position + index_bytes], "big")
            position += index_bytes
            yield item, index & (2 ** (8 * index_bytes - 1) - 1)  # the highest bit means "essential"


def primary_item(pitm: _Bytes) -> int:
    """Return the number of the item that is shown."""
    (item,) = struct.unpack_from(">I" if pitm[0] else ">H", pitm, 4)
    return item


class _Picture(NamedTuple):
    """An AV1 picture, or the first one of a track, with the size in its box."""

    item: int | None
    stated_wh: _SizeWh
    data: _Bytes


def require_stated_sizes(data: bytes | mmap.mmap, canvas_wh: _SizeWh) -> None:
    """Check that the AV1 pictures of a file have the sizes in its boxes; `canvas_wh` is the image's size.

    libavif scales a picture of another size, after it has decoded it.

    Raises:
        ImageError: A picture has another size (`size_disagrees`).
    """
    view = memoryview(data)
    max_tile_wh = (canvas_wh[0] + _MAX_TILE_PADDING_PX, canvas_wh[1] + _MAX_TILE_PADDING_PX)
    num_units = 0
    tiles: set[int] = set()
    with suppress(*_DAMAGE):
        tiles = _tiles(view)

    for find in (_items, _tracks):
        pictures: list[_Picture] = []
        with suppress(*_DAMAGE):
            pictures += find(view)
        for picture in pictures:
            sequence: _Sequence | None = None
            with suppress(*_DAMAGE):
                for kind, unit in _units(picture.data):
                    num_units += 1
                    if num_units > _MAX_UNITS:
                        raise _disagrees(f"it has more than {_MAX_UNITS:,} units of AV1")
                    if kind in _FRAME_HEADERS and sequence is not None:
                        _require_short_fields(unit, sequence)
                    if kind != _SEQUENCE_HEADER:
                        continue
                    sequence = _sequence(unit)
                    coded_wh = sequence.wh
                    if coded_wh != picture.stated_wh:
                        _raise_for(picture.stated_wh, "its AV1 picture", coded_wh)
                    if picture.item in tiles and (
                        coded_wh[0] > max_tile_wh[0] or coded_wh[1] > max_tile_wh[1]
                    ):
                        _raise_for(canvas_wh, "a tile of it", coded_wh)


def _require_short_fields(frame_header: _Bytes, sequence: _Sequence) -> None:
    # The decoder accepts a frame that is larger than its sequence allows. Fields as short as the sequence
    # needs limit such a frame to twice the width and height.
    needed_bits = tuple(max(1, (edge_px - 1).bit_length()) for edge_px in sequence.wh)
    is_long = any(bits > needed for bits, needed in zip(sequence.field_bits, needed_bits, strict=True))
    if is_long and _states_size(frame_header, sequence):
        width, height = (2**bits for bits in sequence.field_bits)
        raise _disagrees(
            f"its AV1 picture has {sequence.wh[1]}x{sequence.wh[0]} (height x width), but a frame of it has "
            f"another size, up to {height}x{width}"
        )


def _raise_for(stated_wh: _SizeWh, name: str, coded_wh: _SizeWh) -> NoReturn:
    stated, coded = f"{stated_wh[1]}x{stated_wh[0]}", f"{coded_wh[1]}x{coded_wh[0]}"
    raise _disagrees(f"its container states {stated} (height x width), but {name} has {coded}")


def _disagrees(detail: str) -> ImageError:
    return ImageError("size_disagrees", detail, fix="save the image again, or remove it")


def _meta(data: _Bytes) -> _Bytes:
    return dict(boxes(data, is_file=True)).get(b"meta", b"")[4:]


def _tiles(data: _Bytes) -> set[int]:
    """Return the items of which the primary item is a grid."""
    meta = dict(boxes(_meta(data)))
    iref = meta.get(b"iref", bytes(4))
    id_bytes = 4 if iref[0] else 2
    tiles: set[int] = set()
    for kind, content in boxes(iref[4:]):
        item, *items = (
            int.from_bytes(content[start : start + id_bytes], "big")
            for start in (0, *range(id_bytes + 2, len(content), id_bytes))
        )
        if kind == b"dimg" and item == primary_item(meta[b"pitm"]):
            tiles.update(items)
    return tiles


def _items(data: _Bytes) -> Iterator[_Picture]:
    meta = dict(boxes(_meta(data)))
    if b"iprp" not in meta:
        return
    iprp = list(boxes(meta[b"iprp"]))
    properties = list(boxes(dict(iprp)[b"ipco"]))
    by_item: dict[int, dict[bytes, _Bytes]] = {}
    for kind, content in iprp:
        for item, index in properties_by_item(content) if kind == b"ipma" else ():
            if 0 < index <= len(properties):
                name, value = properties[index - 1]
                by_item.setdefault(item, {}).setdefault(name, value)

    for item, content in _locations(data, meta[b"iloc"], meta.get(b"idat", b"")):
        named = by_item.get(item, {})
        if b"av1C" in named and b"ispe" in named:
            yield _Picture(item, struct.unpack_from(">II", named[b"ispe"], 4), content)


def _locations(data: _Bytes, iloc: _Bytes, idat: _Bytes) -> Iterator[tuple[int, _Bytes]]:
    """Yield each item with its data."""
    version = iloc[0]
    offset_bytes, length_bytes = iloc[4] >> 4, iloc[4] & 15
    base_bytes, index_bytes = iloc[5] >> 4, iloc[5] & 15 if version else 0
    id_bytes = 4 if version == 2 else 2
    position = 6

    def number(num_bytes: int) -> int:
        nonlocal position
        position += num_bytes
        if position > len(iloc):
            raise IndexError
        return int.from_bytes(iloc[position - num_bytes : position], "big")

    num_copied_bytes = 0
    for _ in range(number(id_bytes)):
        item = number(id_bytes)
        source = idat if version and number(2) & 15 else data
        number(2)  # the file with the data, which is this one
        base = number(base_bytes)
        parts: list[_Bytes] = []
        for _ in range(number(2)):
            number(index_bytes)
            start, length = base + number(offset_bytes), number(length_bytes)
            parts.append(source[start : start + length] if length else source[start:])

        # Extents may overlap: a small file could state any amount of data.
        num_copied_bytes += sum(map(len, parts)) if len(parts) > 1 else 0
        if num_copied_bytes > len(data):
            raise _disagrees("its container states more data than it has")
        yield item, parts[0] if len(parts) == 1 else b"".join(parts)


def _tracks(data: _Bytes) -> Iterator[_Picture]:
    for kind, track in boxes(dict(boxes(data, is_file=True)).get(b"moov", b"")):
        if kind != b"trak":
            continue
        named = dict(boxes(track))
        minf = dict(boxes(dict(boxes(named[b"mdia"]))[b"minf"]))
        table = dict(boxes(minf[b"stbl"]))
        if b"av01" not in dict(boxes(table[b"stsd"][8:])):
            continue

        # Only the first picture is decoded: the first one of the first chunk.
        chunk_format, chunks = (">I", table[b"stco"]) if b"stco" in table else (">Q", table[b"co64"])
        (start,) = struct.unpack_from(chunk_format, chunks, 8)
        size, num_sizes = struct.unpack_from(">II", table[b"stsz"], 4)
        if not size and num_sizes:
            (size,) = struct.unpack_from(">I", table[b"stsz"], 12)
        width, height = struct.unpack(">II", named[b"tkhd"][-8:])
        yield _Picture(None, (width >> 16, height >> 16), data[start : start + size])


def _units(data: _Bytes) -> Iterator[tuple[int, _Bytes]]:
    """Yield type and content of each unit (OBU)."""
    position = 0
    while position < len(data):
        header = data[position]
        position += 1 + (header >> 2 & 1)  # one more byte with an extension
        size = len(data) - position
        if header & 2:
            # LEB128: seven bits per byte, the lowest first.
            size = shift = 0
            while True:
                byte = data[position]
                position += 1
                size |= (byte & 127) << shift
                shift += 7
                if byte < 128 or shift > 56:
                    break
        yield header >> 3 & 15, data[position : position + size]
        position += size


class _Bits:
    """The bits of a header, the highest bit of a byte first."""

    def __init__(self, data: _Bytes) -> None:
        # More than the longest header, with 32 operating points.
        header = bytes(data[:512])
        self._bits = int.from_bytes(header, "big")
        self._end = len(header) * 8

    def number(self, num_bits: int) -> int:
        """Return the next bits as a number; raises IndexError past the end."""
        self._end -= num_bits
        if self._end < 0:
            raise IndexError
        return self._bits >> self._end & (1 << num_bits) - 1


class _Sequence(NamedTuple):
    """The header of a sequence.

    Attributes:
        wh: `max_frame_width` and `max_frame_height`.
        field_bits: Lengths of the fields in which a frame can state its own width and height.
        is_reduced: Whether the header is the one of a still picture, whose frame states no size.
        time_bits: Length of the time in the header of a shown frame.
        id_bits: Length of the identifier in the header of a frame.
        screen_content: Whether frames have tools for screen content, or `_CHOSEN_BY_FRAME`.
        integer_motion: Whether motion vectors are integers, or `_CHOSEN_BY_FRAME`.
    """

    wh: _SizeWh
    field_bits: tuple[int, int]
    is_reduced: bool
    time_bits: int = 0
    id_bits: int = 0
    screen_content: int = _CHOSEN_BY_FRAME
    integer_motion: int = _CHOSEN_BY_FRAME


def _sequence(sequence_header: _Bytes) -> _Sequence:
    number = _Bits(sequence_header).number
    number(4)  # profile, still picture
    is_reduced = bool(number(1))
    delay_bits = time_bits = 0
    if is_reduced:
        number(5)
    else:
        if number(1):
            delay_bits, time_bits = _timing(number)
        has_display_delays = number(1)
        for _ in range(number(5) + 1):  # operating points
            number(12)
            if number(5) > 7:
                number(1)
            if delay_bits and number(1):
                number(2 * delay_bits + 1)
            if has_display_delays and number(1):
                number(4)

    field_bits = number(4) + 1, number(4) + 1
    wh = number(field_bits[0]) + 1, number(field_bits[1]) + 1
    if is_reduced:
        return _Sequence(wh, field_bits, is_reduced)

    id_bits = number(4) + number(3) + 3 if number(1) else 0
    number(3 + 4)  # coding tools
    if number(1):  # order of frames
        number(2)
    screen_content = _CHOSEN_BY_FRAME if number(1) else number(1)
    integer_motion = _CHOSEN_BY_FRAME
    if screen_content and not number(1):
        integer_motion = number(1)
    return _Sequence(wh, field_bits, is_reduced, time_bits, id_bits, screen_content, integer_motion)


def _timing(number: Callable[[int], int]) -> tuple[int, int]:
    """Return the lengths of an operating point's delays, and of the time in the header of a frame."""
    number(64)
    is_regular = number(1)
    if is_regular:
        num_zeros = 0
        while not number(1):
            num_zeros += 1
        number(num_zeros)
    if not number(1):  # model of the decoder
        return 0, 0
    delay_bits = number(5) + 1
    number(32 + 5)
    time_bits = number(5) + 1
    return delay_bits, 0 if is_regular else time_bits


def _states_size(frame_header: _Bytes, sequence: _Sequence) -> bool:
    """Return whether a frame states its own size (`frame_size_override_flag`)."""
    number = _Bits(frame_header).number
    if sequence.is_reduced or number(1):  # a frame that was decoded before is shown
        return False
    kind, is_shown = number(2), number(1)
    if is_shown:
        number(sequence.time_bits)
    else:
        number(1)
    if kind == _SWITCH_FRAME:
        return True
    if not (kind == _KEY_FRAME and is_shown):
        number(1)  # resilience to errors
    number(1)
    screen_content = sequence.screen_content
    if screen_content == _CHOSEN_BY_FRAME:
        screen_content = number(1)
    if screen_content and sequence.integer_motion == _CHOSEN_BY_FRAME:
        number(1)
    number(sequence.id_bits)
    return bool(number(1))
