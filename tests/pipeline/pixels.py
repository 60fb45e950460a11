"""Images in memory with known pixels, and their decoded values."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from pipeline.images.decode import decode

Pixels = npt.NDArray[np.uint8]
WHITE = (255, 255, 255)


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pattern(height: int = 24, width: int = 40) -> Pixels:
    """Return pixels (H, W, 3) that no flip or rotation maps to themselves."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 255 // height, columns * 255 // width, (rows * columns) % 256], -1).astype(
        np.uint8
    )


def decoded(data: bytes, background: tuple[int, int, int] = WHITE) -> npt.NDArray[np.int64]:
    image = decode(data, background)
    assert image.mode == "RGB"
    return np.asarray(image).astype(np.int64)


def stored_png(levels: npt.NDArray[np.integer[Any]], bits: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """Return a grey PNG (H, W) or an RGB one (H, W, 3) with levels of 1 to 16 bits, and these chunks."""
    height, width = levels.shape[:2]
    samples = levels.reshape(height, -1)
    if bits < 8:
        stored = np.packbits((samples[..., None] >> np.arange(bits)[::-1]) & 1, axis=None).reshape(height, -1)
        assert samples.shape[1] * bits % 8 == 0, "each row must fill its bytes"
    else:
        stored = samples.astype(">u2" if bits == 16 else "u1").view(np.uint8).reshape(height, -1)
    rows = b"".join(b"\0" + row.tobytes() for row in stored.astype(np.uint8))
    header = struct.pack(">IIBBBBB", width, height, bits, 2 if levels.ndim == 3 else 0, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
