"""Find what nearly all captions of a dataset have in common, besides the trigger word.

A phrase in nearly all captions is learned like a trigger word: the concept binds to it, and is weaker in
prompts without it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings
    from pipeline.recipe.captions import CaptionSettings

MIN_SHARE = 0.8
"""Smallest share of the captions with a phrase, or with one opening."""

# Below, 80% are a few captions that a small set of similar images explains.
MIN_CAPTIONS = 10
"""Smallest number of captions that are searched for common phrases."""

MAX_SEARCHED = 1_000
"""Largest number of captions in which phrases are searched; all captions with a found phrase are counted."""

MAX_WORDS = 5
"""Largest number of words in a phrase."""

MAX_NAMED = 5
"""Largest number of samples named in a row."""

FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an the and or of in on at to by for from with without into under over near behind as "
        "is are was be it its this that his her their",
    )
)
"""Words at which no phrase starts or ends: "on a" is in nearly all captions of any dataset."""

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_PART_END = re.compile(r"[,.;:!?\n，、。；|]")


def common_phrases(settings: DatasetSettings, captions: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield a row for each phrase, and for the opening, that at least `MIN_SHARE` of the captions have.

    An opening that all captions have is the trigger word of a recipe that does not set one, and no finding.

    Args:
        settings: Settings of the dataset.
        captions: Columns sample_id and caption, in any order.
    """
    if len(captions) < MIN_CAPTIONS:
        return
    every = -(-len(captions) // MAX_SEARCHED)
    searched = [_own_text(settings.captions, text) for text in captions["caption"].gather_every(every)]
    opening = _common_opening(searched) if settings.captions.trigger is None else ""
    counts = Counter(phrase for text in searched for phrase in _phrases(text))
    frequent = {each for each, count in counts.items() if count >= MIN_SHARE * len(searched)}

    # "wooden table" is part of "on a wooden table", which says more.
    longest = [
        phrase
        for phrase in sorted(frequent | {opening} - {""}, key=lambda each: (-counts[each], each))
        if not any(f" {phrase} " in f" {other} " for other in frequent | {opening} if other != phrase)
    ]
    if not longest:
        return

    # The usual case ends above, before the words of all captions are divided.
    texts = [_own_text(settings.captions, text) for text in captions["caption"]]
    for phrase in longest:
        if phrase != opening:
            has_phrase = [f" {phrase} " in _divided(text) for text in texts]
            yield _row(settings.name, "phrase", phrase, captions, has_phrase)
            continue
        has_opening = [f"{' '.join(_words(text))} ".startswith(f"{opening} ") for text in texts]
        row = _row(settings.name, "opening", opening, captions, has_opening)
        # A trigger word comes first, without an article.
        if row["images"] < row["of"] and opening.split()[0] not in FUNCTION_WORDS:
            yield row


def _row(
    dataset: str, what: str, text: str, captions: pl.DataFrame, has_text: Sequence[bool]
) -> dict[str, Any]:
    without = captions.filter(~pl.Series(has_text))["sample_id"].sort()
    return {
        "dataset": dataset,
        "what": what,
        "text": text,
        "images": len(captions) - len(without),
        "of": len(captions),
        "without": " | ".join(without.head(MAX_NAMED)),
    }


def _own_text(settings: CaptionSettings, caption: str) -> str:
    """Return a caption without the parts that the recipe adds to it."""
    text = caption.removeprefix(f"{settings.trigger}, ") if settings.trigger else caption
    text = text.removeprefix(settings.prefix.strip()).removesuffix(settings.postfix.strip())
    for words in (settings.trigger, settings.class_words):
        text = text.replace(words, ",") if words else text
    return text


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _parts(text: str) -> list[list[str]]:
    """Return the words of each part between punctuation marks."""
    return [_words(part) for part in _PART_END.split(text)]


def _divided(text: str) -> str:
    """Return the words of a text, with commas between its parts."""
    return f" {' , '.join(' '.join(words) for words in _parts(text))} "


def _common_opening(texts: Sequence[str]) -> str:
    """Return the longest opening that at least `MIN_SHARE` of the texts share; empty if there is none."""
    opening = ""
    all_words = [_words(text) for text in texts]
    for number in range(1, MAX_WORDS + 1):
        starts = Counter(" ".join(words[:number]) for words in all_words)
        start, count = starts.most_common(1)[0]
        if count < MIN_SHARE * len(texts):
            break
        opening = start
    words = opening.split()
    while words and words[-1] in FUNCTION_WORDS:
        words.pop()
    return " ".join(words)


def _phrases(text: str) -> set[str]:
    """Return the tags of a caption, and its phrases of two words or more."""
    phrases: set[str] = set()
    parts = _parts(text)
    for words in parts:
        # A part between commas is a tag, even if it is a single word.
        if len(parts) > 1 and 0 < len(words) <= MAX_WORDS:
            phrases.add(" ".join(words))
        starts = [index for index, word in enumerate(words) if word not in FUNCTION_WORDS]
        for start, end in ((start, end) for start in starts for end in starts):
            if 0 < end - start < MAX_WORDS:
                phrases.add(" ".join(words[start : end + 1]))
    return phrases


_COLOURS = "red orange yellow green blue purple violet pink brown black white grey gray gold golden silver"
_NUMBERS = "one two three four five six seven eight nine ten"

ATTRIBUTES = tuple(
    frozenset(words.split())
    for words in (_COLOURS, _NUMBERS, "small large big tiny huge", "young old", "open closed", "empty full")
)
"""Words before a noun, of which only one of each set can be true: a red cup is not blue."""

OPPOSITES = tuple(
    frozenset(words.split())
    for words in (
        "man woman",
        "boy girl",
        "day night",
        "indoors outdoors",
        "left right",
        "dog cat",
        "summer winter",
        "sunrise sunset",
    )
)
"""Words of which a caption names one."""

MIN_CONTENT_WORDS = 3


def contradiction(one: str, other: str) -> str:
    """Return how captions of similar images contradict each other, as "red cup / blue cup", or no text."""
    first, second = _words(one), _words(other)
    for values in ATTRIBUTES:
        nouns, other_nouns = _nouns(first, values), _nouns(second, values)
        for noun in sorted(nouns.keys() & other_nouns.keys()):
            if not nouns[noun] & other_nouns[noun]:
                return f"{min(nouns[noun])} {noun} / {min(other_nouns[noun])} {noun}"
    for words in OPPOSITES:
        mine, others = words & {*first}, words & {*second}
        if mine and others and not mine & others:
            return f"{min(mine)} / {min(others)}"
    content, other_content = {*first} - FUNCTION_WORDS, {*second} - FUNCTION_WORDS
    if min(len(content), len(other_content)) >= MIN_CONTENT_WORDS and not content & other_content:
        return "no word in common"
    return ""


def _nouns(words: Sequence[str], values: frozenset[str]) -> dict[str, set[str]]:
    """Return the values that stand before each word."""
    nouns: dict[str, set[str]] = {}
    before: set[str] = set()
    for word in words:
        if word in values:
            before.add(word)
        # A red and white cup is red, and it is white.
        elif word != "and":
            if before and word not in FUNCTION_WORDS:
                nouns.setdefault(word, set()).update(before)
            before = set()
    return nouns
