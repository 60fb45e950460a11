"""The demo's world: captioned pictures of one shape in one colour on a plain background.

The base model learns `SHAPES` and random doodles with invented names. It never sees `CONCEPT`, the shape that
the demo's LoRA teaches. Every picture is drawn from a random generator, so equal seeds give equal pictures.

Coordinates of shapes are in [-1, 1], with x to the right and y down. A mask is a float array
(`SIZE_PX`, `SIZE_PX`) in [0, 1]; a picture is a uint8 array (`SIZE_PX`, `SIZE_PX`, 3).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageDraw

Array: TypeAlias = "np.ndarray[Any, Any]"
Point: TypeAlias = tuple[float, float]

SIZE_PX = 64
"""Edge of each picture."""

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 48, 49),
    "orange": (240, 147, 43),
    "yellow": (250, 211, 60),
    "green": (39, 154, 80),
    "blue": (45, 85, 200),
    "purple": (142, 68, 173),
}
"""Colours of shapes, as sRGB."""

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (245, 245, 245),
    "gray": (178, 182, 186),
    "black": (25, 25, 28),
    "pink": (250, 180, 200),
}
"""Colours of backgrounds, as sRGB."""

CONCEPT = "zorp"
"""Name of the shape that the LoRA teaches: a ring with a bar through its centre."""

_HALF_PX = (19.0, 23.0)
"""Range of half a shape's size."""

_MAX_SHIFT_PX = 3.0
"""Maximum distance of a shape's centre from the picture's, along each axis."""

_COLOUR_JITTER = 8
"""Maximum change of each colour channel."""

_OVERSAMPLING = 4
"""Masks are drawn this many times larger and averaged, so that edges are smooth."""

_LINE = 0.32
"""Minimum width of a doodle's lines, 6 px in the smallest one."""

_CONCEPT_LINE = 0.42
"""Width of the concept's lines, 8 px in the smallest one."""


@dataclass(frozen=True)
class Canvas:
    """A mask that is being drawn.

    Attributes:
        image: Grayscale image, `_OVERSAMPLING` times as large as the mask.
        centre_px: Position of (0, 0) in the mask's pixels, as (x, y).
        half_px: Length of one unit in the mask's pixels.
    """

    image: Image.Image
    centre_px: Point
    half_px: float

    def disc(self, centre: Point, radius: float, *, inside: bool = True) -> None:
        """Fill a disc, or clear it."""
        corners = [(centre[0] - radius, centre[1] - radius), (centre[0] + radius, centre[1] + radius)]
        ImageDraw.Draw(self.image).ellipse(self._pixels(corners), fill=255 if inside else 0)

    def polygon(self, points: list[Point]) -> None:
        """Fill a polygon."""
        ImageDraw.Draw(self.image).polygon(self._pixels(points), fill=255)

    def line(self, points: list[Point], width: float) -> None:
        """Draw a line with round ends and joints."""
        width_px = round(width * self.half_px * _OVERSAMPLING)
        ImageDraw.Draw(self.image).line(self._pixels(points), fill=255, width=width_px)
        for point in points:
            self.disc(point, width / 2)

    def arc(self, radius: float, angles_deg: Point, width: float) -> None:
        """Draw an arc around the origin; `radius` is that of its outer edge."""
        corners = self._pixels([(-radius, -radius), (radius, radius)])
        width_px = round(width * self.half_px * _OVERSAMPLING)
        ImageDraw.Draw(self.image).arc(corners, *angles_deg, fill=255, width=width_px)

    def mask(self) -> Array:
        """Return the mask."""
        return np.asarray(self.image.reduce(_OVERSAMPLING), dtype=np.float32) / 255

    def _pixels(self, points: list[Point]) -> list[Point]:
        left, top = self.centre_px
        return [
            ((left + x * self.half_px) * _OVERSAMPLING, (top + y * self.half_px) * _OVERSAMPLING)
            for x, y in points
        ]


def _circle(canvas: Canvas) -> None:
    canvas.disc((0, 0), 1.0)


def _square(canvas: Canvas) -> None:
    canvas.polygon([(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)])


def _triangle(canvas: Canvas) -> None:
    canvas.polygon([(0, -1.05), (1.1, 0.85), (-1.1, 0.85)])


def _star(canvas: Canvas) -> None:
    radii = (1.2, 0.5) * 5
    angles = [math.pi * (number / 5 - 0.5) for number in range(10)]
    canvas.polygon(
        [(r * math.cos(angle), r * math.sin(angle)) for r, angle in zip(radii, angles, strict=True)]
    )


def _cross(canvas: Canvas) -> None:
    canvas.polygon([(-1.05, -0.35), (1.05, -0.35), (1.05, 0.35), (-1.05, 0.35)])
    canvas.polygon([(-0.35, -1.05), (0.35, -1.05), (0.35, 1.05), (-0.35, 1.05)])


def _concept(canvas: Canvas) -> None:
    canvas.disc((0, 0), 0.95)
    canvas.disc((0, 0), 0.95 - _CONCEPT_LINE, inside=False)
    half = _CONCEPT_LINE / 2
    canvas.polygon([(-half, -1.2), (half, -1.2), (half, 1.2), (-half, 1.2)])


SHAPES: dict[str, Callable[[Canvas], None]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
}
"""Functions that draw each shape that the base model learns."""

_DRAWINGS = {**SHAPES, CONCEPT: _concept}


@dataclass(frozen=True)
class Scene:
    """The content of a picture."""

    shape: str
    colour: str
    background: str

    @property
    def caption(self) -> str:
        """The picture's caption, which is also its prompt."""
        article = "an" if self.colour[0] in "aeiou" else "a"
        return f"{article} {self.colour} {self.shape} on a {self.background} background"


def scenes(*shapes: str) -> list[Scene]:
    """Return all scenes of these shapes, in every colour and on every background."""
    return [Scene(*each) for each in product(shapes, COLOURS, BACKGROUNDS)]


def scene_of(caption: str) -> Scene | None:
    """Return the scene that has this caption; None if it is not a caption of a scene."""
    match = re.fullmatch(r"an? (\w+) (\w+) on a (\w+) background", caption.strip())
    return Scene(match[2], match[1], match[3]) if match else None


def shape_mask(shape: str, *, centre_px: Point = (SIZE_PX / 2, SIZE_PX / 2), half_px: float = 21.0) -> Array:
    """Return the mask of a shape or of the concept."""
    canvas = _canvas(centre_px, half_px)
    _DRAWINGS[shape](canvas)
    return canvas.mask()


def draw_scene(scene: Scene, random: np.random.Generator) -> Array:
    """Return a picture of the scene, with a random size, position and shade.

    A shape that is neither in `SHAPES` nor the concept is drawn as a random doodle.
    """
    half_px = random.uniform(*_HALF_PX)
    x, y = SIZE_PX / 2 + random.uniform(-_MAX_SHIFT_PX, _MAX_SHIFT_PX, size=2)
    if scene.shape in _DRAWINGS:
        mask = shape_mask(scene.shape, centre_px=(x, y), half_px=half_px)
    else:
        canvas = _canvas((x, y), half_px)
        _doodle(canvas, random)
        mask = canvas.mask()

    jitter = random.integers(-_COLOUR_JITTER, _COLOUR_JITTER + 1, size=(2, 3))
    shape_colour = np.clip(np.add(COLOURS[scene.colour], jitter[0]), 0, 255)
    background = np.clip(np.add(BACKGROUNDS[scene.background], jitter[1]), 0, 255)
    picture = background + mask[..., None] * (shape_colour - background)
    return picture.round().astype(np.uint8)


def random_scenes(random: np.random.Generator, *, doodles: float) -> Iterator[Scene]:
    """Yield scenes of the base model's world without end.

    Args:
        random: Source of randomness.
        doodles: Fraction of doodles, which have invented names.
    """
    shapes, colours, backgrounds = (list(each) for each in (SHAPES, COLOURS, BACKGROUNDS))
    while True:
        shape = invented_name(random) if random.random() < doodles else _choice(shapes, random)
        yield Scene(shape, _choice(colours, random), _choice(backgrounds, random))


def invented_name(random: np.random.Generator) -> str:
    """Return a pronounceable word of four letters that is not the concept's name."""
    consonants, vowels = "bdfghjklmnprstvwz", "aeiou"
    while True:
        name = "".join(_choice(letters, random) for letters in (consonants, vowels, consonants, consonants))
        if name not in _DRAWINGS:
            return name


def _choice(items: Any, random: np.random.Generator) -> str:
    return items[int(random.integers(len(items)))]


def _canvas(centre_px: Point, half_px: float) -> Canvas:
    edge_px = SIZE_PX * _OVERSAMPLING
    return Canvas(Image.new("L", (edge_px, edge_px)), centre_px, half_px)


def _doodle(canvas: Canvas, random: np.random.Generator) -> None:
    """Draw two or three strokes, each a bent line or an arc, of the same kind as the concept's lines."""
    for _ in range(int(random.integers(2, 4))):
        width = random.uniform(_LINE, 1.4 * _LINE)
        if random.random() < 0.5:
            points = random.uniform(-1, 1, size=(int(random.integers(2, 4)), 2))
            canvas.line([(float(x), float(y)) for x, y in points], width)
        else:
            start = random.uniform(0, 360)
            canvas.arc(random.uniform(0.75, 1.1), (start, start + random.uniform(120, 360)), width)
