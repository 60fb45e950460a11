"""Grids of drawn pictures: one column per prompt, one row per step, with headings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.reporting.lettering import line_height_px, wrapped, write_lines

if TYPE_CHECKING:
    from PIL import Image

CELL_PX = 256
"""Edge of a picture's square on a grid: smaller pictures are enlarged to it, larger ones reduced."""

TEXT_PX = 15
"""Font size of headings and labels."""

LABEL_PX = 110
"""Width of the labels to the left of the rows; without labels, the grid has no such column."""

MAX_HEADING_LINES = 8
"""Maximum number of lines of a heading; longer prompts end in an ellipsis."""

_GAP_PX = 8
_SMALL_PX = 128
"""Pictures below this edge are enlarged without smoothing, which shows their pixels as they are."""


def picture_grid(
    rows: Sequence[tuple[str, Sequence[Image.Image | None]]],
    headings: Sequence[str],
    *,
    title: str = "",
    cell_px: int = CELL_PX,
    label_px: int = LABEL_PX,
) -> Image.Image:
    """Return an RGB picture with a heading above each column and a label to the left of each row.

    Args:
        rows: Label and pictures of each row, from top to bottom. A missing picture is None.
        headings: Texts above the columns, which are wrapped to the width of a cell.
        title: Text above the grid; empty for none.
        cell_px: Edge of the square that each picture is fitted into.
        label_px: Width of the labels.
    """
    from PIL import Image, ImageDraw

    line_px = line_height_px(TEXT_PX)
    label_px = label_px if any(label for label, _ in rows) else _GAP_PX
    width_px = label_px + len(headings) * (cell_px + _GAP_PX)
    title_lines = wrapped(title, TEXT_PX, width_px=width_px - 2 * _GAP_PX, max_lines=MAX_HEADING_LINES)
    heading_lines = [
        wrapped(text, TEXT_PX, width_px=cell_px, max_lines=MAX_HEADING_LINES) for text in headings
    ]
    title_px = len(title_lines) * line_px + 2 * _GAP_PX
    top_px = title_px + max((len(lines) for lines in heading_lines), default=0) * line_px + _GAP_PX
    canvas = Image.new("RGB", (width_px, top_px + len(rows) * (cell_px + _GAP_PX)), "white")
    draw = ImageDraw.Draw(canvas)

    write_lines(draw, title_lines, left_px=_GAP_PX, top_px=_GAP_PX, size_px=TEXT_PX)
    for column, lines in enumerate(heading_lines):
        left_px = label_px + column * (cell_px + _GAP_PX)
        write_lines(draw, lines, left_px=left_px, top_px=title_px, size_px=TEXT_PX)

    for row, (label, pictures) in enumerate(rows):
        row_px = top_px + row * (cell_px + _GAP_PX)
        lines = wrapped(label, TEXT_PX, width_px=label_px - 2 * _GAP_PX, max_lines=max(1, cell_px // line_px))
        write_lines(draw, lines, left_px=_GAP_PX, top_px=row_px, size_px=TEXT_PX)
        for column, picture in enumerate(pictures):
            if picture is not None:
                canvas.paste(fitted(picture, cell_px), (label_px + column * (cell_px + _GAP_PX), row_px))
    return canvas


def fitted(picture: Image.Image, edge_px: int) -> Image.Image:
    """Return the picture in RGB, enlarged or reduced so that its longer edge is `edge_px`."""
    from PIL import Image

    scale = edge_px / max(picture.size)
    size_wh = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    is_small = max(picture.size) < _SMALL_PX
    resampling = Image.Resampling.NEAREST if is_small else Image.Resampling.LANCZOS
    return picture.convert("RGB").resize(size_wh, resampling)


def evenly_spaced(number: int, most: int) -> list[int]:
    """Return at most `most` indices below `number` in order, evenly spaced from the first to the last."""
    if number <= most:
        return list(range(number))
    return [round(index * (number - 1) / max(1, most - 1)) for index in range(most)]
