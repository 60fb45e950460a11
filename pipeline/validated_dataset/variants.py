"""The captions of one image: what is put before and after each, and lists of tags in several orders."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.validated_dataset.captions import canonical

if TYPE_CHECKING:
    from pipeline.recipe import CaptionSettings, ShuffleSettings


def variants(settings: CaptionSettings, captions: Sequence[str]) -> tuple[str, ...]:
    """Every caption of an image, in canonical form, each once, the first as it is written first.

    Args:
        settings: The dataset's `captions` section.
        captions: Canonical texts, at least one.
    """
    made = [caption for text in captions for caption in _orders(settings, text)]
    return tuple(dict.fromkeys(made))


def _orders(settings: CaptionSettings, text: str) -> list[str]:
    orders = [text]
    if settings.shuffle is not None:
        orders += [
            _shuffled(text, settings.shuffle, number) for number in range(1, settings.shuffle.variants)
        ]
    return [
        canonical(f"{settings.prefix}{_triggered(settings, order)}{settings.postfix}") for order in orders
    ]


def _triggered(settings: CaptionSettings, text: str) -> str:
    trigger = settings.trigger
    if trigger is None or re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text):
        return text
    return f"{trigger}, {text}"


def _shuffled(text: str, settings: ShuffleSettings, number: int) -> str:
    """The tags in an order that the text and the number decide, those kept at the start in their places."""
    tags = [tag.strip() for tag in text.split(settings.separator)]
    head, tail = tags[: settings.keep], tags[settings.keep :]
    tail.sort(key=lambda tag: hashlib.sha256(f"{number}\0{text}\0{tag}".encode()).digest())
    joint = settings.separator if settings.separator.isspace() else f"{settings.separator.strip()} "
    return joint.join(head + tail)
