"""The parts of the corpus: one pattern in every format, with pixels that need no decoder."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]

HEIGHT, WIDTH = 48, 72
_rows, _columns = np.mgrid[0:HEIGHT, 0:WIDTH]
PATTERN: Pixels = np.stack(
    [_rows * 255 // HEIGHT, _columns * 255 // WIDTH, (_rows * 3 + _columns) * 255 // (HEIGHT * 3 + WIDTH)], -1
).astype(np.uint8)
GREY: Pixels = PATTERN[..., 1]
WHITE = 255


@dataclass(frozen=True)
class Case:
    """One file and its expected outcome.

    Attributes:
        name: Path in the folder.
        put: Function that writes the file.
        reason: Expected reason code, or several as "one or other"; None for a kept file, "skipped" for a file
            that is not an image.
        pixels: Expected pixels, uint8 (H, W, 3); None if the test only checks that the file is kept.
        tolerance: Largest allowed difference of a pixel value.
        caption: Bytes of the caption file; None for no caption file.
    """

    name: str
    put: Callable[[Path], object]
    reason: str | None = None
    pixels: Pixels | None = None
    tolerance: int = 0
    caption: bytes | None = b"a caption"


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def put(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def grey3(levels: npt.NDArray[Any]) -> Pixels:
    return np.repeat(levels.astype(np.uint8)[..., None], 3, axis=2)


def over_white(colours: Pixels, alpha: npt.NDArray[Any]) -> Pixels:
    """Composite colours over white, rounded to the nearest value."""
    share = alpha.astype(np.float64)[..., None] / 255
    return np.floor(colours * share + WHITE * (1 - share) + 0.5).astype(np.uint8)


RGB = Image.fromarray(PATTERN)
ALPHA: Pixels = ((_rows * 7) % 256).astype(np.uint8)
RGBA = Image.fromarray(np.dstack([PATTERN, ALPHA]))
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "png": ("PNG", {}),
    "jpg": ("JPEG", {"quality": 95, "subsampling": 0}),
    "webp": ("WEBP", {"lossless": True}),
    "tif": ("TIFF", {}),
    "bmp": ("BMP", {}),
    "gif": ("GIF", {}),
    "avif": ("AVIF", {"quality": 95}),
    "jp2": ("JPEG2000", {}),
}
LOSSY = {"jpg": 8, "avif": 24, "gif": 90}
"""Largest difference of a pixel value by the format's loss (GIF: 256 colours)."""


def of_format(suffix: str) -> bytes:
    kind, options = FORMATS[suffix]
    return saved(RGB, kind, **options)


def png_of(width: int, height: int, data: bytes | None = None) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packed = zlib.compress(b"\0" * 100) if data is None else data
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def bmp_of(width: int, height: int) -> bytes:
    start = struct.pack("<IHHI", 54, 0, 0, 54)
    return (
        b"BM" + start + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0) + bytes(100)
    )


def with_inverted_byte(data: bytes, at: int) -> bytes:
    raw = bytearray(data)
    raw[at] ^= 255
    return bytes(raw)
