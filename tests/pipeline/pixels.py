"""Images in memory with known pixels, and their decoded values."""

from __future__ import annotations

import io

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
