"""Create the variants of an image's captions: prefix, postfix, trigger word, shuffled and dropped tags."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.validated_dataset.captions import canonical

if TYPE_CHECKING:
    from pipeline.recipe import CaptionSettings


def variants(settings: CaptionSettings, captions: Sequence[str]) -> tuple[str, ...]:
    """Return all caption variants of an image in canonical form.

    The first variant has all tags in their written order. Without `drop_tags`, there are no duplicates.

    `captions` are canonical texts, at least one.
    """
    texts = [variant for text in dict.fromkeys(captions) for variant in _variants_of(settings, text)]
    # Training draws each variant equally often. Without the variants that lack no tag, tags would be dropped
    # more often than the rate says.
    return tuple(texts if settings.drop_tags is not None else dict.fromkeys(texts))


def _variants_of(settings: CaptionSettings, text: str) -> list[str]:
    texts = [text]
    if settings.tags is not None:
        texts += [_changed_tags(settings, text, number) for number in range(1, settings.tags.variants)]
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


def _changed_tags(settings: CaptionSettings, text: str, number: int) -> str:
    """Return the tags of a variant from number 1; the first `keep` tags stay in place."""
    assert settings.tags is not None
    separator, keep = settings.tags.separator, settings.tags.keep
    tags = [tag.strip() for tag in text.split(separator)]
    head, tail = tags[:keep], tags[keep:]
    if settings.drop_tags is not None:
        tail = _without_dropped(settings, settings.drop_tags.rate, text, tail, number, is_all=not head)

    # Sorted by hashes instead of shuffled by a generator: the order depends on nothing but text and number.
    if settings.shuffle is not None:
        tail.sort(key=lambda tag: hashlib.sha256(f"{number}\0{text}\0{tag}".encode()).digest())
    separator = separator if separator.isspace() else f"{separator.strip()} "
    return separator.join(head + tail)


def _without_dropped(
    settings: CaptionSettings, rate: float, text: str, tags: list[str], number: int, *, is_all: bool
) -> list[str]:
    """Return the tags that a variant has; `is_all` if there are no others in front of them."""

    def bits(tag: str) -> int:
        # By its own stream, so that a tag is dropped or not in whatever place shuffling puts it.
        return int.from_bytes(hashlib.sha256(f"drop\0{number}\0{text}\0{tag}".encode()).digest()[:8], "big")

    kept = [tag for tag in tags if bits(tag) >= rate * 2**64 or _names_subject(settings, tag)]
    # A caption without any tag would be the empty caption, which `caption_dropout` is for.
    return kept if kept or not is_all else [max(tags, key=bits)]


def _names_subject(settings: CaptionSettings, tag: str) -> bool:
    placeholder = settings.placeholder
    return settings.names_trigger(tag) or (placeholder is not None and placeholder in tag)
