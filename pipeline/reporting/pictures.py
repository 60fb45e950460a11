"""Small pictures for reports: sheets of thumbnails, and charts.

Each comes as the bytes of a file below a number of bytes, because Dagster keeps it in its event log.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.images.decode import File, decode
from pipeline.images.formats import ImageError
from pipeline.reporting.progress import progress
from pipeline.reporting.reports import Log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL import Image

MAX_PICTURE_BYTES = 66_000
"""Three of them, an asset's, stay below 200 KB."""

THUMBNAIL_PX = 96
LABEL_PX = 150

_GAP_PX = 4
_GREY = "lightgrey"
_WHITE = (255, 255, 255)
_DPI = 90


@dataclass(frozen=True)
class SheetImage:
    """An image on a contact_sheet.

    Attributes:
        path: Of the file; None for one that must not be opened, which is a grey frame.
        size: Height and width in pixels after EXIF orientation; a file that cannot be read is a grey frame
            of this shape. None where it is not known: a square.
        box: What is kept of it, (left, upper, right, lower) in pixels of the image; the rest is darkened.
            None for all.
    """

    path: File | None
    size: tuple[int, int] | None = None
    box: tuple[float, float, float, float] | None = None


@dataclass(frozen=True)
class SheetRow:
    """A line of a contact_sheet: a label, and the images to its right."""

    label: str
    images: Sequence[SheetImage]


def contact_sheet(strips: Sequence[SheetRow], *, log: Log, max_bytes: int = MAX_PICTURE_BYTES) -> bytes:
    """A JPEG with one line of thumbnails a strip, at least one strip.

    Every image is decoded, on all cores, JPEGs at a fraction of their size: dozens of images, seconds.

    Args:
        strips: From top to bottom.
        log: Told how far it is, where it takes long: images may be large, or lie elsewhere.
        max_bytes: Of the JPEG.
    """
    from PIL import Image, ImageDraw

    images = [shown for strip in strips for shown in strip.images]
    done: list[Image.Image] = []
    with (
        progress(lambda: len(done), len(images), "thumbnails drawn", log=log),
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        done.extend(pool.map(thumbnail, images))
    thumbnails = iter(done)
    widest = max(len(strip.images) for strip in strips)
    canvas = Image.new("RGB", (LABEL_PX + widest * THUMBNAIL_PX, len(strips) * THUMBNAIL_PX), "white")
    draw = ImageDraw.Draw(canvas)
    for line, strip in enumerate(strips):
        top = line * THUMBNAIL_PX
        draw.text((6, top + THUMBNAIL_PX // 2 - 6), strip.label, fill="black")
        for place in range(len(strip.images)):
            small = next(thumbnails)
            left = LABEL_PX + place * THUMBNAIL_PX + (THUMBNAIL_PX - small.width) // 2
            canvas.paste(small, (left, top + (THUMBNAIL_PX - small.height) // 2))
    return jpeg(canvas, max_bytes)


def thumbnail(shown: SheetImage) -> Image.Image:
    """The image, RGB, its longer edge a little below `THUMBNAIL_PX`, what is outside of its box darkened."""
    from PIL import Image, ImageEnhance

    image = None
    if shown.path is not None:
        with suppress(ImageError, OSError):
            image = decode(shown.path, _WHITE, draft_px=2 * THUMBNAIL_PX)
    drawn = (1, 1) if image is None else (image.height, image.width)
    height, width = drawn if shown.size is None else shown.size
    scale = (THUMBNAIL_PX - 6) / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    if image is None:
        return Image.new("RGB", size, _GREY)
    small = image.resize(size)
    if shown.box is None:
        return small
    left, upper, right, lower = (round(edge * scale) for edge in shown.box)
    kept = (left, upper, max(right, left + 1), max(lower, upper + 1))
    dark = ImageEnhance.Brightness(small).enhance(0.35)
    dark.paste(small.crop(kept), kept[:2])
    return dark


def side_by_side(left: Image.Image, right: Image.Image, *, edge_px: int) -> Image.Image:
    """Two pictures of one size side by side, the longer edge of each `edge_px` at most."""
    from PIL import Image

    scale = min(1.0, edge_px / max(left.size))
    size = (max(1, round(left.width * scale)), max(1, round(left.height * scale)))
    canvas = Image.new("RGB", (2 * size[0] + _GAP_PX, size[1]), "white")
    for place, picture in enumerate((left, right)):
        canvas.paste(picture.resize(size), (place * (size[0] + _GAP_PX), 0))
    return canvas


def jpeg(picture: Image.Image, max_bytes: int = MAX_PICTURE_BYTES) -> bytes:
    """The picture as a JPEG of the best quality, then the best size, that stays below `max_bytes`."""
    while True:
        for quality in (85, 70, 55, 40):
            file = io.BytesIO()
            picture.save(file, "JPEG", quality=quality)
            if file.tell() <= max_bytes:
                return file.getvalue()
        picture = picture.resize((max(1, picture.width * 3 // 4), max(1, picture.height * 3 // 4)))


def chart(width_px: int = 560, height_px: int = 560) -> tuple[Figure, Axes]:
    """An empty chart, to be drawn on and handed to `png`."""
    figure, (axes,) = charts(1, width_px, height_px)
    return figure, axes


def charts(number: int, width_px: int, height_px: int) -> tuple[Figure, list[Axes]]:
    """Empty charts side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_px / _DPI, height_px / _DPI), dpi=_DPI, layout="constrained")
    return figure, [figure.add_subplot(1, number, place + 1) for place in range(number)]


def png(figure: Figure) -> bytes:
    """The chart as a PNG of a few dozen colours, mostly below 20 KB."""
    from PIL import Image

    drawn, file = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(64).save(file, "PNG", optimize=True)
    return file.getvalue()
