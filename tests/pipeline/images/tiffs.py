"""TIFFs that Pillow cannot write, built from their tags."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

_SHORT, _LONG, _FLOAT = 3, 4, 11
_DEFLATE = 8
_SAMPLE_FORMATS = {"u": 1, "i": 2, "f": 3}


def grey_tiff(
    levels: npt.NDArray[np.generic],
    *,
    white_is_zero: bool = False,
    big_endian: bool = False,
    deflate: bool = False,
    levels_from_to: tuple[float, float] | None = None,
) -> bytes:
    """Return a grey TIFF of one strip; `levels_from_to` are SMinSampleValue and SMaxSampleValue."""
    order = ">" if big_endian else "<"
    height, width = levels.shape
    strip = levels.astype(levels.dtype.newbyteorder(order)).tobytes()
    strip = zlib.compress(strip) if deflate else strip
    tags: dict[int, tuple[int, float]] = {
        256: (_LONG, width),
        257: (_LONG, height),
        258: (_SHORT, levels.dtype.itemsize * 8),
        259: (_SHORT, _DEFLATE if deflate else 1),
        262: (_SHORT, 0 if white_is_zero else 1),
        273: (_LONG, 8),
        277: (_SHORT, 1),
        278: (_LONG, height),
        279: (_LONG, len(strip)),
        339: (_SHORT, _SAMPLE_FORMATS[levels.dtype.kind]),
    }
    if levels_from_to is not None:
        tags |= {340: (_FLOAT, levels_from_to[0]), 341: (_FLOAT, levels_from_to[1])}
    return _file(strip, tags, order)


def _file(strip: bytes, tags: Mapping[int, tuple[int, float]], order: str) -> bytes:
    # A value of less than four bytes is at the left end of its field.
    codes = {_SHORT: "Hxx", _LONG: "I", _FLOAT: "f"}
    directory = struct.pack(f"{order}H", len(tags))
    for tag, (kind, value) in sorted(tags.items()):
        directory += struct.pack(f"{order}HHI{codes[kind]}", tag, kind, 1, value)
    magic = b"MM\0*" if order == ">" else b"II*\0"
    strip += b"\0" * (len(strip) % 2)
    return magic + struct.pack(f"{order}I", 8 + len(strip)) + strip + directory + b"\0\0\0\0"
