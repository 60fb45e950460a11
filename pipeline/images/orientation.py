"""Read the orientation of an image from its metadata, and the operation that makes it upright."""

from __future__ import annotations

import io
from typing import BinaryIO

from PIL import Image

from pipeline.images.geometry import Size

_ORIENTATION_TAG = 274

TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The operation that makes an image of each EXIF orientation upright."""


def orientation_of(image: Image.Image) -> int:
    """Return the orientation from EXIF or XMP, 1 to 8; a PNG with late metadata must be loaded before."""
    try:
        # The PNG plug-in's own getexif would decode all pixels to search behind them.
        value = Image.Image.getexif(image).get(_ORIENTATION_TAG, 1)
    # Damaged metadata count as none: viewers show such a photograph as stored, so it stays usable.
    except Exception:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def has_late_metadata(image: Image.Image) -> bool:
    """Return True for a PNG that is not loaded yet and has EXIF or text chunks behind its first pixels."""
    file: BinaryIO | None = getattr(image, "fp", None)
    if image.format != "PNG" or file is None or getattr(image, "_im", None) is not None:
        return False

    # A PNG is a signature of 8 bytes and a list of chunks: length (4 bytes, big endian), type (4), data,
    # checksum (4).
    position = file.tell()
    try:
        file.seek(8)
        seen_pixels = False
        while len(header := file.read(8)) == 8:
            length, chunk_type = int.from_bytes(header[:4], "big"), header[4:]
            if seen_pixels and chunk_type in {b"eXIf", b"tEXt", b"zTXt", b"iTXt"}:
                return True
            seen_pixels |= chunk_type == b"IDAT"
            file.seek(length + 4, io.SEEK_CUR)
        return False
    finally:
        file.seek(position)


def oriented_size(image: Image.Image, orientation: int) -> Size:
    """Return the size of the upright image."""
    size = Size(image.height, image.width)

    # Pillow already applies a TIFF's own tag to its size.
    already_upright = image.format == "TIFF" and _ORIENTATION_TAG in getattr(image, "tag_v2", {})
    return size.transposed if orientation >= 5 and not already_upright else size
