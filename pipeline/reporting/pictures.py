"""Pictures for reports: sheets of thumbnails, and charts, each as the bytes of a file."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pipeline.images.decode import DecodeLimits, File, decoded
from pipeline.images.decoder_warnings import counted_warnings
from pipeline.images.formats import ImageError
from pipeline.log import Log
from pipeline.reporting.lettering import line_height_px, shortened, wrapped, write_lines
from pipeline.reporting.progress import progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL import Image

T = TypeVar("T")
R = TypeVar("R")

# Dagster stores pictures in its event log.
MAX_PICTURE_BYTES = 66_000
"""Maximum size of one picture, so that the three of an asset stay below 200 kB."""

MAX_SHEET_BYTES = 300_000
"""Maximum size of a contact sheet. Its text must be legible; the UI embeds a reduced one."""

THUMBNAIL_PX = 144
"""Edge of a thumbnail's square on a sheet."""

LABEL_PX = 150
"""Width of the labels on a sheet."""

NAME_PX = 11
"""Font size of names and captions on a sheet."""

MAX_CAPTION_LINES = 3
"""Maximum number of lines of a caption on a sheet; longer captions end in an ellipsis."""

MAX_LABEL_LINES = 6
"""Maximum number of lines of a row's label."""

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
        name: File name, written below the thumbnail.
        caption: Caption, written below the name.
        change: Function that changes the decoded image before it is reduced. Its `ImageError` gives the grey
            frame.
    """

    path: File | None
    size: tuple[int, int] | None = None
    box: tuple[float, float, float, float] | None = None
    name: str = ""
    caption: str = ""
    change: Callable[[Image.Image], Image.Image] | None = None

    def lines(self) -> list[str]:
        """Return the lines of text below the thumbnail."""
        width_px = THUMBNAIL_PX - _MARGIN_PX
        names = [shortened(self.name, NAME_PX, width_px)] if self.name else []
        caption = wrapped(self.caption, NAME_PX, width_px=width_px, max_lines=MAX_CAPTION_LINES)
        return [*names, *caption]


@dataclass(frozen=True)
class SheetRow:
    """One row of a sheet: a label and the images to its right."""

    label: str
    images: Sequence[SheetImage]


def contact_sheet(rows: Sequence[SheetRow], *, title: str = "", log: Log) -> bytes:
    """Return a JPEG with a line of thumbnails for each row, and names and captions below them.

    Every image is decoded, on all cores. Dozens of images take seconds; `log` receives the progress.
    """
    from PIL import Image, ImageDraw

    thumbnails = for_each_image([image for row in rows for image in row.images], thumbnail, log=log)
    lines = [[image.lines() for image in row.images] for row in rows]
    line_px = line_height_px(NAME_PX)
    rows_px = [THUMBNAIL_PX + line_px * max((len(each) for each in row), default=0) for row in lines]
    title_px = line_px + _MARGIN_PX if title else 0
    width_px = LABEL_PX + max(len(row.images) for row in rows) * THUMBNAIL_PX
    canvas = Image.new("RGB", (width_px, title_px + sum(rows_px)), "white")
    draw = ImageDraw.Draw(canvas)

    title_lines = [shortened(title, NAME_PX, width_px)] if title else []
    write_lines(draw, title_lines, left_px=_MARGIN_PX, top_px=_GAP_PX, size_px=NAME_PX)
    remaining = iter(thumbnails)
    top_px = title_px
    for row, row_lines, height_px in zip(rows, lines, rows_px, strict=True):
        label_width_px = LABEL_PX - 2 * _MARGIN_PX
        label = wrapped(row.label, NAME_PX, width_px=label_width_px, max_lines=MAX_LABEL_LINES)
        label_top_px = top_px + THUMBNAIL_PX // 2 - _MARGIN_PX
        write_lines(draw, label, left_px=_MARGIN_PX, top_px=label_top_px, size_px=NAME_PX)

        for column, image_lines in enumerate(row_lines):
            small = next(remaining)
            left_px = LABEL_PX + column * THUMBNAIL_PX
            offset_px = ((THUMBNAIL_PX - small.width) // 2, (THUMBNAIL_PX - small.height) // 2)
            canvas.paste(small, (left_px + offset_px[0], top_px + offset_px[1]))
            text_left_px, text_top_px = left_px + _MARGIN_PX // 2, top_px + THUMBNAIL_PX
            write_lines(draw, image_lines, left_px=text_left_px, top_px=text_top_px, size_px=NAME_PX)
        top_px += height_px
    return jpeg(canvas, MAX_SHEET_BYTES)


def for_each_image(images: Sequence[T], draw: Callable[[T], R], *, log: Log) -> list[R]:
    """Return the result of `draw` for each image, computed on all cores; `log` receives the progress."""
    results: list[R] = []
    with (
        counted_warnings(log),
        progress(lambda: len(results), len(images), "thumbnails drawn", log=log),
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        results.extend(pool.map(draw, images))
    return results


def thumbnail(item: SheetImage) -> Image.Image:
    """Return the thumbnail, or a grey frame of the same shape for an image that cannot be read."""
    from PIL import Image

    picture = readable_thumbnail(item, edge_px=THUMBNAIL_PX)
    if picture is None:
        size_wh, _ = _fitted_size(item.size or (1, 1), THUMBNAIL_PX)
        return Image.new("RGB", size_wh, _GREY)
    return picture


def readable_thumbnail(item: SheetImage, *, edge_px: int) -> Image.Image | None:
    """Return the image in RGB, slightly smaller than `edge_px` and darkened outside its box.

    None if the image cannot or must not be read.
    """
    if item.path is not None:
        # A JPEG is decoded at a reduced size, but with twice the edge, which leaves the resize enough pixels.
        limits, draft_px = DecodeLimits(), 2 * edge_px
        with (
            suppress(ImageError, OSError),
            decoded(item.path, _WHITE, limits=limits, draft_px=draft_px) as image,
        ):
            return _drawn(item, image, edge_px=edge_px)
    return None


def _drawn(item: SheetImage, image: Image.Image, *, edge_px: int) -> Image.Image:
    from PIL import ImageEnhance

    # The decoded image may be smaller than the original; the box refers to pixels of the original.
    size_wh, scale = _fitted_size(item.size or (image.height, image.width), edge_px)
    small = (image if item.change is None else item.change(image)).resize(size_wh)
    if item.box is None:
        return small
    left, upper, right, lower = (round(edge * scale) for edge in item.box)
    visible = (left, upper, max(right, left + 1), max(lower, upper + 1))
    dark = ImageEnhance.Brightness(small).enhance(0.35)
    dark.paste(small.crop(visible), visible[:2])
    return dark


def _fitted_size(size_hw: tuple[int, int], edge_px: int) -> tuple[tuple[int, int], float]:
    height, width = size_hw
    scale = (edge_px - _MARGIN_PX) / max(height, width)
    return (max(1, round(width * scale)), max(1, round(height * scale))), scale


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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    # Not `savefig`, which compresses the picture that is compressed again below.
    canvas, file = FigureCanvasAgg(figure), io.BytesIO()
    canvas.draw()
    drawn = Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba()))
    drawn.convert("RGB").quantize(64).save(file, "PNG", optimize=True)
    return file.getvalue()
