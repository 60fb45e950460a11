"""Convert values of other trainers' settings; foreign_datasets.toml names the conversion of each setting."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.recipe.captions import MAX_VARIANTS

_DEFAULT_VARIANTS = 4
"""Number of tag orders to cache for a trainer that shuffles tags in every step."""


def _choice(choices: Mapping[str, str]) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in choices:
            raise ValueError("the captions are detected in the folder instead")
        return choices[value]

    return convert


def _repeats(value: Any) -> int:
    number = float(value)
    if number < 1 or number != int(number):
        raise ValueError("repeats must be an integer of at least 1; datasets[].weight sets fractions")
    return int(number)


def _fraction(value: Any) -> float:
    if not 0 <= float(value) < 1:
        raise ValueError("it must be at least 0 and below 1")
    return float(value)


def _rate(value: Any) -> float | None:
    rate = float(value)
    if not 0 <= rate <= 1:
        raise ValueError("it must be between 0 and 1")
    return rate or None


def _loss_weight(value: Any) -> float | None:
    weight = float(value)
    if weight <= 0 or not math.isfinite(weight):
        raise ValueError("it must be a number above 0")
    return None if weight == 1 else weight


def _ratio(value: Any) -> float:
    if float(value) < 1:
        raise ValueError("it must be at least 1")
    return round(float(value), 4)


def _orders(value: Any) -> int | None:
    # Within the limits of `captions.shuffle.variants`.
    return min(max(int(value), 2), MAX_VARIANTS) if int(value) else None


def _resolutions(value: Any) -> list[int]:
    # A pair inside a list is height and width, and the list itself has resolutions.
    values: list[Any] = value if isinstance(value, list) else [value]
    return [_square(each) for each in values]


def _square(value: Any) -> int:
    # An edge, a pair, or text such as 512,768. A recipe's resolution is the edge of the square of that area.
    edges = (
        re.split("[,x]", value) if isinstance(value, str) else value if isinstance(value, list) else [value]
    )
    edge = round(math.sqrt(float(edges[0]) * float(edges[-1])))
    if edge < 64:
        raise ValueError("it must be a number of pixels")
    return edge


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "text": str,
    "text_and_space": lambda value: f"{value} ",
    "space_and_text": lambda value: f" {value}",
    "suffix": lambda value: f".{str(value).lstrip('.')}",
    "repeats": _repeats,
    "extra_repeats": lambda value: _repeats(float(value) + 1),
    "count": int,
    "fraction": _fraction,
    "rate": _rate,
    "loss_weight": _loss_weight,
    "ratio": _ratio,
    "variants": lambda value: _DEFAULT_VARIANTS if value else None,
    "orders": _orders,
    "flag": lambda value: True if value else None,
    "each_line": lambda value: "each" if value else None,
    "never": lambda value: "never" if value else None,
    "random": lambda value: "random" if value else None,
    "resolution": _resolutions,
    "square": lambda value: [_square(value)],
    "listed_resolutions": lambda value: [_square(each) for each in str(value).split(",")],
    "prompt_source": _choice({"sample": "sidecar", "filename": "filename", "concept": "fixed"}),
    "caption_strategy": _choice({"textfile": "sidecar", "filename": "filename", "instanceprompt": "fixed"}),
}
"""Conversions of a setting's value by their name in foreign_datasets.toml; None means a setting that is off.
A TypeError or ValueError means that the value cannot be taken over."""
