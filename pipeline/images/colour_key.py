"""The transparent colour of a PNG, compared with the levels in the range that the PNG states it in.

A PNG states the colour in the range of its stored levels. Pillow decodes grey of 2 and 4 bits and RGB of 16
bits to 8 bits, but leaves the transparent colour as it is.
"""

from __future__ import annotations

from typing import Any, BinaryIO, cast

import numpy as np
from PIL import Image, ImageChops

_GREY_SCALES = {"L;2": 85, "L;4": 17}
"""Distance of two levels after decoding, by Pillow's raw mode."""

_RGB_OF_16_BITS = "RGB;16B"

_ROWS_AT_ONCE = 256


def load_with_key(image: Image.Image, file: BinaryIO) -> bool:
    """Load an opened image; the transparent colour of a PNG then has the range of the decoded levels.

    RGB of 16 bits with a transparent colour becomes RGBA. Returns True if another range, in which 0.3.0
    compared the colour, would make other pixels transparent.
    """
    # Loading removes the raw mode.
    tiles: list[Any] = getattr(image, "tile", [])
    raw_mode = tiles[0].args if image.format == "PNG" and tiles else None
    image.load()
    key: Any = image.info.get("transparency")
    if key is None:
        return False
    if raw_mode in _GREY_SCALES:
        scale = _GREY_SCALES[raw_mode]
        scaled = key % (255 // scale + 1) * scale
        image.info["transparency"] = scaled
        return scaled != key and image.histogram()[scaled] > 0
    if raw_mode == _RGB_OF_16_BITS:
        alpha = _alpha_of_16_bits(image, file, key)
        before = image.convert("RGBA").getchannel("A")
        del image.info["transparency"]
        image.putalpha(alpha)
        return ImageChops.difference(before, alpha).getbbox() is not None
    return False


def _alpha_of_16_bits(image: Image.Image, file: BinaryIO, key: tuple[int, int, int]) -> Image.Image:
    """Return the opacity (mode L) of RGB of 16 bits, of which `image` has the upper bytes."""
    upper_key, lower_key = np.array(key) >> 8, np.array(key) & 255
    alpha = Image.new("L", image.size, 255)
    file.seek(0)
    with Image.open(file, formats=["PNG"]) as lower:
        # Read as little-endian, the lower byte of each level is the upper one, which Pillow decodes.
        png = cast("Any", lower)
        png.tile = [tile._replace(args="RGB;16L") for tile in png.tile]
        for top in range(0, image.height, _ROWS_AT_ONCE):
            box = (0, top, image.width, min(top + _ROWS_AT_ONCE, image.height))
            differs = (np.asarray(image.crop(box)) != upper_key) | (np.asarray(lower.crop(box)) != lower_key)
            alpha.paste(Image.fromarray(differs.any(axis=2).astype(np.uint8) * 255), box)
    return alpha
