"""Image files that would exhaust the memory or the time of a program that decodes them without limits."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image

EDGE_PX = 13_377
"""Edge of the largest square below the default of `checks.max_image_pixels`."""

_SOS, _EOI = b"\xff\xda", b"\xff\xd9"


def png(*, edge_px: int = EDGE_PX, bit_depth: int = 16, colour_type: int = 0, chunks: bytes = b"") -> bytes:
    """Return a PNG of zeros: a row per deflate block, 1,000 times smaller than its pixels.

    `chunks` are inserted before the pixels.
    """
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour_type]
    row = b"\0" * (1 + edge_px * channels * bit_depth // 8)
    deflate = zlib.compressobj(1)
    pixels = b"".join(deflate.compress(row) for _ in range(edge_px)) + deflate.flush()
    header = struct.pack(">IIBBBBB", edge_px, edge_px, bit_depth, colour_type, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    start, *rest = [png_chunk(*part) for part in parts]
    return b"\x89PNG\r\n\x1a\n" + start + chunks + b"".join(rest)


def png_chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG with its length and checksum."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_with_warnings(number: int, *, edge_px: int = 16) -> bytes:
    """Return a PNG whose EXIF data has so many tags that state more bytes than the file has."""
    tags = b"".join(struct.pack("<HHII", 40_000 + index, 2, 10**7, 0) for index in range(number))
    exif = b"II*\0" + struct.pack("<IH", 8, number) + tags + b"\0\0\0\0"
    return png(edge_px=edge_px, bit_depth=8, colour_type=2, chunks=png_chunk(b"eXIf", exif))


def float_tiff(*, edge_px: int = EDGE_PX, rows_per_strip: int = 64) -> bytes:
    """Return a TIFF of 32-bit floats in which all strips are the same few bytes."""
    strip = zlib.compress(b"\0" * (4 * edge_px * rows_per_strip), 9)
    num_strips = -(-edge_px // rows_per_strip)
    tables_at = 8 + 2 + 12 * 10 + 4
    strip_at = tables_at + 8 * num_strips
    entries = [
        (256, 4, 1, edge_px),
        (257, 4, 1, edge_px),
        (258, 3, 1, 32),
        (259, 3, 1, 8),  # deflate
        (262, 3, 1, 1),
        (273, 4, num_strips, tables_at),
        (277, 3, 1, 1),
        (278, 4, 1, rows_per_strip),
        (279, 4, num_strips, tables_at + 4 * num_strips),
        (339, 3, 1, 3),  # floats
    ]
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    offsets = struct.pack("<I", strip_at) * num_strips
    lengths = struct.pack("<I", len(strip)) * num_strips
    return b"II*\0" + struct.pack("<I", 8) + directory + b"\0\0\0\0" + offsets + lengths + strip


def jpeg_with_scans(number: int, *, edge_px: int = 64, between: bytes = b"") -> bytes:
    """Return a progressive JPEG whose last scan is repeated; each repetition decodes all pixels again."""
    file = io.BytesIO()
    picture = Image.radial_gradient("L").resize((edge_px, edge_px)).convert("RGB")
    picture.save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(_SOS)
    return data[:last] + (data[last:-2] + between) * (number - data.count(_SOS) + 1) + _EOI
