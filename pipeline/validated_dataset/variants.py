"""Create the variants of an image's captions: prefix, postfix, trigger word and shuffled tags."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.validated_dataset.captions import canonical

if TYPE_CHECKING:
    from pipeline.recipe import CaptionSettings, ShuffleSettings


def variants(settings: CaptionSettings, captions: Sequence[str]) -> tuple[str, ...]:
    """Return all caption variants of an image in canonical form, without duplicates.

    The first variant has the tags in their written order.

    `captions` are canonical texts, at least one.
    """
    return tuple(dict.fromkeys(variant for text in captions for variant in _variants_of(settings, text)))


def _variants_of(settings: CaptionSettings, text: str) -> list[str]:
    texts = [text]
    shuffle = settings.shuffle
    if shuffle is not None:
        texts += [_shuffled(text, shuffle, number) for number in range(1, shuffle.variants)]
    return [
        canonical(f"{settings.prefix}{_with_trigger(settings, each)}{settings.postfix}") for each in texts
    ]


def _with_trigger(settings: CaptionSettings, text: str) -> str:
    """Return the text with the trigger word, in place of the placeholder or in front, or with class words."""
    trigger = settings.trigger
    if trigger is not None and settings.class_words is not None:
        return _with_class_words(settings.class_words, trigger, settings.placeholder, text)
    text = settings.with_trigger(text)

    # A caption that names the trigger word already keeps it in its place.
    if trigger is None or settings.names_trigger(text):
        return text
    return f"{trigger}, {text}"


def _with_class_words(class_words: str, trigger: str, placeholder: str | None, text: str) -> str:
    """Return the text with the class words in place of the trigger word and of the placeholder."""
    if placeholder is not None:
        text = text.replace(placeholder, class_words)
    return re.sub(rf"(?<!\w){re.escape(trigger)}(?!\w)", lambda _: class_words, text)


def _shuffled(text: str, settings: ShuffleSettings, number: int) -> str:
    """Return the tags in an order derived from text and number; the first `keep` tags stay in place."""
    tags = [tag.strip() for tag in text.split(settings.separator)]
    head, tail = tags[: settings.keep], tags[settings.keep :]

    # Sorted by hashes instead of shuffled by a generator: the order depends on nothing but text and number.
    tail.sort(key=lambda tag: hashlib.sha256(f"{number}\0{text}\0{tag}".encode()).digest())
    separator = settings.separator if settings.separator.isspace() else f"{settings.separator.strip()} "
    return separator.join(head + tail)
