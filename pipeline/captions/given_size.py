"""The size in which a captioning model gets an image."""

from __future__ import annotations

import math

from pipeline.images.geometry import Size


def given_size(original: Size, resolution: int) -> Size:
    """Return the size in which the model gets an image: its own, or scaled down to `resolution` squared."""
    num_px = original.height * original.width
    if num_px <= resolution**2:
        return original
    scale = resolution / math.sqrt(num_px)
    return Size(*(max(1, int(edge * scale)) for edge in original))
