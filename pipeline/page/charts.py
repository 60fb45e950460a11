"""Line charts as SVG, which need no script and follow the colours of the page.

viewBox 480 x 260; curves are polylines of the classes line-0 to line-4, whose colours are in page.css
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

MAX_POINTS = 400
"""Maximum number of points of a curve; more are averaged in groups."""

MAX_LINES = 5
"""Number of curves that the style sheet tells apart, by colour and by dashes."""

_WIDTH, _HEIGHT = 480, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 10, 38
_NUM_TICKS = 5

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One curve of a chart.

    Attributes:
        points: (x, y) in ascending order of x; points that are not finite are omitted.
        style: Number of its colour, 0 to `MAX_LINES` - 1; None for a faint curve behind the others.
    """

    label: str
    points: Sequence[Point]
    style: int | None = 0


def line_chart(lines: Sequence[Line], *, title: str, x: str = "step", logarithmic: bool = False) -> Markup:
    """Return a figure with the curves, their legend, and a text alternative; empty without two points.

    With `logarithmic`, values that are not positive are omitted.
    """
    finite = [Line(each.label, _finite(each.points, logarithmic), each.style) for each in lines]
    shown = [each for each in finite if len(each.points) > 1]
    if not shown:
        return Markup("")

    xs = [point[0] for each in shown for point in each.points]
    ys = [_scaled(point[1], logarithmic) for each in shown for point in each.points]
    x_range, y_range = (min(xs), max(xs)), _padded(min(ys), max(ys))
    parts = [*_x_axis(x_range, x), *_y_axis(y_range, logarithmic)]
    for each in shown:
        places = " ".join(
            f"{_place(px, x_range, _LEFT, _WIDTH - _RIGHT):.1f},"
            f"{_place(_scaled(py, logarithmic), y_range, _HEIGHT - _BOTTOM, _TOP):.1f}"
            for px, py in _thinned(each.points)
        )
        parts.append(f'<polyline class="line {_line_class(each)}" points="{places}"/>')

    summary = f"{title}. {'; '.join(_in_words(each, x) for each in shown if each.style is not None)}"
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    svg = f'<svg {size} role="img" aria-label="{escape(summary)}">{"".join(parts)}</svg>'
    # A title that names the only curve needs no legend.
    legend = "".join(
        f'<li><svg class="key" viewBox="0 0 24 8" aria-hidden="true">'
        f'<line class="line {_line_class(each)}" x1="0" y1="4" x2="24" y2="4"/></svg>'
        f"{escape(each.label)}</li>"
        for each in shown
        if len(shown) > 1
    )
    scale = ", logarithmic scale" if logarithmic else ""
    # The texts were escaped above.
    return Markup(  # noqa: S704
        f'<figure class="chart"><figcaption>{escape(title)}{scale}</figcaption>{svg}'
        f"{'<ul class=legend>' + legend + '</ul>' if legend else ''}</figure>"
    )


def _finite(points: Sequence[Point], logarithmic: bool) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not logarithmic)]


def _thinned(points: Sequence[Point]) -> list[Point]:
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil(len(points) / MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (math.fsum(x for x, _ in group) / len(group), math.fsum(y for _, y in group) / len(group))
        for group in groups
    ]


def _scaled(y: float, logarithmic: bool) -> float:
    return math.log10(y) if logarithmic else y


def _padded(low: float, high: float) -> tuple[float, float]:
    # A constant curve runs through the middle.
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _place(value: float, of: tuple[float, float], start: float, end: float) -> float:
    low, high = of
    return start + (end - start) * ((value - low) / (high - low) if high > low else 0.5)


def _x_axis(of: tuple[float, float], label: str) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    parts = [f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH - _RIGHT}" y2="{bottom}"/>']
    for value in _ticks(*of, whole=True):
        place = _place(value, of, _LEFT, _WIDTH - _RIGHT)
        parts.append(f'<text x="{place:.1f}" y="{bottom + 16}" text-anchor="middle">{value:,.0f}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return [*parts, f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(label)}</text>']


def _y_axis(of: tuple[float, float], logarithmic: bool) -> list[str]:
    parts: list[str] = []
    for value in _powers(*of) if logarithmic else _ticks(*of):
        place = _place(value, of, _HEIGHT - _BOTTOM, _TOP)
        text = number_text(10**value if logarithmic else value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" y1="{place:.1f}" x2="{_WIDTH - _RIGHT}" y2="{place:.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{text}</text>')
    return parts


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return round numbers from `low` to `high`, at distances of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / _NUM_TICKS or 1.0
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    if whole:
        step = max(1.0, step)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [(first + index) * step for index in range(max(0, count))]


def _powers(low: float, high: float) -> list[float]:
    """Return the logarithms of 1, 2 and 5 times powers of ten, or of the powers alone in a wide range."""
    factors = (1, 2, 5) if high - low < 2 else (1,)
    powers = range(math.floor(low), math.ceil(high) + 1)
    values = [power + math.log10(factor) for power in powers for factor in factors]
    return [value for value in values if low <= value <= high]


def _line_class(line: Line) -> str:
    return "line-faint" if line.style is None else f"line-{line.style % MAX_LINES}"


def _in_words(line: Line, x: str) -> str:
    (x_first, first), (x_last, last) = line.points[0], line.points[-1]
    x_low, lowest = min(line.points, key=lambda point: point[1])
    return (
        f"{line.label}: {number_text(first)} at {x} {x_first:,.0f}, "
        f"{number_text(last)} at {x} {x_last:,.0f}, lowest {number_text(lowest)} at {x} {x_low:,.0f}"
    )


def number_text(value: Any) -> str:
    """Return a number with four significant digits, such as "0.0832"; an empty text for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
