"""Pictures for reports: sheets of thumbnails, and charts.

Each is returned as the bytes of a small file, because Dagster stores it in its event log.
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
"""Maximum size of one picture, so that the three of an asset stay below 200 kB."""

THUMBNAIL_PX = 96
"""Edge of a thumbnail's square on a sheet."""

LABEL_PX = 150
"""Width of the labels on a sheet."""

_MARGIN_PX = 6
_GAP_PX = 4
_GREY = "lightgrey"
_WHITE = (255, 255, 255)
_DPI = 90


@dataclass(frozen=True)
class SheetImage:
    """An image on a sheet.

    Attributes:
        path: Image file; None for one that must not be opened, which becomes a grey frame.
        size: (height, width) in pixels after EXIF orientation, also the shape of the grey frame that replaces
            an unreadable file; None if unknown.
        box: Region to show, (left, upper, right, lower) in pixels; the rest is darkened. None for all.
    """

    path: File | None
    size: tuple[int, int] | None = None
    box: tuple[float, float, float, float] | None = None


@dataclass(frozen=True)
class SheetRow:
    """One row of a sheet: a label and the images to its right."""

    label: str
    images: Sequence[SheetImage]


def contact_sheet(rows: Sequence[SheetRow], *, log: Log, max_bytes: int = MAX_PICTURE_BYTES) -> bytes:
    """Return a JPEG with a line of thumbnails for each row.

    Every image is decoded, on all cores, JPEGs at reduced size. Dozens of images take seconds.

    Args:
        rows: At least one row, from top to bottom.
        log: Receives the progress of slow work, such as large or remote images.
        max_bytes: Maximum size of the JPEG.
    """
    from PIL import Image, ImageDraw

    images = [image for row in rows for image in row.images]
    thumbnails: list[Image.Image] = []
    with (
        progress(lambda: len(thumbnails), len(images), "thumbnails drawn", log=log),
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        thumbnails.extend(pool.map(thumbnail, images))

    num_columns = max(len(row.images) for row in rows)
    canvas = Image.new("RGB", (LABEL_PX + num_columns * THUMBNAIL_PX, len(rows) * THUMBNAIL_PX), "white")
    draw = ImageDraw.Draw(canvas)
    remaining = iter(thumbnails)
    for index, row in enumerate(rows):
        top = index * THUMBNAIL_PX
        draw.text((_MARGIN_PX, top + THUMBNAIL_PX // 2 - _MARGIN_PX), row.label, fill="black")
        for column in range(len(row.images)):
            small = next(remaining)
            left = LABEL_PX + column * THUMBNAIL_PX + (THUMBNAIL_PX - small.width) // 2
            canvas.paste(small, (left, top + (THUMBNAIL_PX - small.height) // 2))
    return jpeg(canvas, max_bytes)


def thumbnail(item: SheetImage) -> Image.Image:
    """Return the image in RGB, slightly smaller than `THUMBNAIL_PX`, darkened outside its box."""
    from PIL import Image, ImageEnhance

    image = None
    if item.path is not None:
        with suppress(ImageError, OSError):
            image = decode(item.path, _WHITE, draft_px=2 * THUMBNAIL_PX)

    # The decoded image may be smaller than the original, whose pixels the box refers to.
    decoded_size = (1, 1) if image is None else (image.height, image.width)
    height, width = decoded_size if item.size is None else item.size
    scale = (THUMBNAIL_PX - _MARGIN_PX) / max(height, width)
    size_wh = (max(1, round(width * scale)), max(1, round(height * scale)))
    if image is None:
        return Image.new("RGB", size_wh, _GREY)

    small = image.resize(size_wh)
    if item.box is None:
        return small
    left, upper, right, lower = (round(edge * scale) for edge in item.box)
    visible = (left, upper, max(right, left + 1), max(lower, upper + 1))
    dark = ImageEnhance.Brightness(small).enhance(0.35)
    dark.paste(small.crop(visible), visible[:2])
    return dark


def side_by_side(left: Image.Image, right: Image.Image, *, edge_px: int) -> Image.Image:
    """Return two pictures of the same size next to one another, each at most `edge_px` long."""
    from PIL import Image

    scale = min(1.0, edge_px / max(left.size))
    size_wh = (max(1, round(left.width * scale)), max(1, round(left.height * scale)))
    canvas = Image.new("RGB", (2 * size_wh[0] + _GAP_PX, size_wh[1]), "white")
    for index, picture in enumerate((left, right)):
        canvas.paste(picture.resize(size_wh), (index * (size_wh[0] + _GAP_PX), 0))
    return canvas


def jpeg(picture: Image.Image, max_bytes: int = MAX_PICTURE_BYTES) -> bytes:
    """Return the picture as a JPEG of at most `max_bytes`; quality is reduced before size."""
    while True:
        for quality in (85, 70, 55, 40):
            file = io.BytesIO()
            picture.save(file, "JPEG", quality=quality)
            if file.tell() <= max_bytes:
                return file.getvalue()
        picture = picture.resize((max(1, picture.width * 3 // 4), max(1, picture.height * 3 // 4)))


def chart(width_px: int = 560, height_px: int = 560) -> tuple[Figure, Axes]:
    """Return an empty chart to draw on; `png` converts the figure."""
    figure, (axes,) = charts(1, width_px, height_px)
    return figure, axes


def charts(number: int, width_px: int, height_px: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with several empty charts next to one another."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_px / _DPI, height_px / _DPI), dpi=_DPI, layout="constrained")
    return figure, [figure.add_subplot(1, number, index + 1) for index in range(number)]


def png(figure: Figure) -> bytes:
    """Return a chart as a PNG with 64 colours, usually below 20 kB."""
    from PIL import Image

    drawn, file = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(64).save(file, "PNG", optimize=True)
    return file.getvalue()
