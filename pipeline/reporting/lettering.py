"""Text on pictures: the font, and lines that fit a width."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.escaping import printable

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

ELLIPSIS = "…"

LINE_HEIGHT = 1.3
"""Distance between two lines of text, as a multiple of the font's size."""


@cache
def font(size_px: int) -> FreeTypeFont:
    """Return the font in which pictures are labelled, in a size in pixels."""
    import matplotlib
    from PIL import ImageFont

    # Matplotlib's font, because Pillow's own one has ASCII letters only. A letter that it lacks, such as a
    # Chinese one, is drawn as a box. The basic layout accepts any text and needs no further library.
    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(file, size_px, layout_engine=ImageFont.Layout.BASIC)


def line_height_px(size_px: int) -> int:
    """Return the height of one line of text at a font size, in pixels."""
    return round(size_px * LINE_HEIGHT)


def write_lines(draw: ImageDraw, lines: Sequence[str], *, left_px: int, top_px: int, size_px: int) -> None:
    """Draw lines of black text below one another."""
    for number, line in enumerate(lines):
        top_of_line_px = top_px + number * line_height_px(size_px)
        draw.text((left_px, top_of_line_px), line, fill="black", font=font(size_px))


def shortened(text: str, size_px: int, width_px: int) -> str:
    """Return printable text that fits `width_px`; the middle of a longer one is replaced by an ellipsis."""
    text = printable(text)
    if _width(text, size_px) <= width_px:
        return text

    # A letter is at least a tenth of the font size wide, so longer texts cannot fit.
    most = min(len(text) - 1, 1 + 10 * width_px // size_px)
    for num_letters in range(most, 1, -1):
        # Both ends remain, because file names often differ at their ends only.
        start, end = text[: (num_letters + 1) // 2], text[len(text) - num_letters // 2 :]
        if _width(start + ELLIPSIS + end, size_px) <= width_px:
            return start + ELLIPSIS + end
    return ELLIPSIS


def wrapped(text: str, size_px: int, *, width_px: int, max_lines: int) -> list[str]:
    """Return the lines of printable text in `width_px`; an ellipsis ends text beyond `max_lines`.

    Lines break between words, or inside a word that is longer than a line.
    """
    lines: list[str] = []
    rest = printable(text)
    while rest and len(lines) < max_lines:
        num_letters = _num_fitting(rest, size_px, width_px)
        if num_letters < len(rest):
            last_space = rest.rfind(" ", 0, num_letters + 1)
            num_letters = last_space if last_space > 0 else num_letters
        lines.append(rest[:num_letters])
        rest = rest[num_letters:].lstrip()

    if rest and lines:
        num_letters = _num_fitting(lines[-1], size_px, width_px - _width(ELLIPSIS, size_px))
        lines[-1] = lines[-1][:num_letters] + ELLIPSIS
    return lines


def _num_fitting(text: str, size_px: int, width_px: float) -> int:
    # At least 1, so that lines make progress in any width.
    low, high = 1, max(1, min(len(text), 1 + 10 * int(width_px) // size_px))
    while low < high:
        middle = (low + high + 1) // 2
        if _width(text[:middle], size_px) <= width_px:
            low = middle
        else:
            high = middle - 1
    return low


def _width(text: str, size_px: int) -> float:
    return font(size_px).getlength(text)
