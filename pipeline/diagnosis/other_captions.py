"""The other captions under which an image's loss is measured: with a word exchanged, or of other images."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pipeline.validated_dataset.caption_phrases import FUNCTION_WORDS

MAX_POOL = 256
"""Maximum number of captions from which the others of an image are chosen."""

MAX_COMPOSED = 256
"""Maximum number of captions that no image has: they are encoded for the diagnosis alone."""

_WORD = re.compile(r"\w+")

_ARTICLE = re.compile(r"\ban?(?=\s$)", re.IGNORECASE)


class CaptionPool:
    """Distinct captions of a dataset, and how much their words differ.

    If two captions differ in one word, these words can be exchanged, as colours can: "a red cup", "a blue
    cup". So can words that are connected by further ones. A caption with an exchanged word tests this word
    alone, also if no image has that caption.

    A trigger word is new to the base model, which would prefer any word that it knows. So captions are
    compared only with captions that have the same trigger words.
    """

    def __init__(
        self, captions: Iterable[str], triggers_in: Callable[[str], frozenset[str]] = lambda _: frozenset()
    ) -> None:
        """Choose a sample of the captions; `triggers_in` returns the trigger words that a caption has."""
        # By hash, so that a large dataset gives a sample that names and order do not decide.
        distinct = sorted({*captions} - {""}, key=_hash)[:MAX_POOL]
        self._words = {caption: words_of(caption) for caption in distinct}
        self._triggers_in = triggers_in
        self._triggers = {caption: triggers_in(caption) for caption in distinct}
        counts = Counter(word for words in self._words.values() for word in words)

        # The inverse document frequency: words that most captions have in common distinguish none of them.
        self._weights = {word: math.log((1 + len(distinct)) / count) for word, count in counts.items()}

        self._exchangeable = _exchangeable(distinct)
        composed = {each for caption in distinct for each in self._composed(caption)}
        self._usable = {*distinct, *sorted(composed.difference(distinct), key=_hash)[:MAX_COMPOSED]}

    def others(self, own: str, number: int) -> list[str]:
        """Return at most `number` captions for comparison with `own`, in the order of their choice.

        The first ones are `own` with one word exchanged. Each of the next ones is the closest to `own` that
        has a word which neither `own` nor an earlier one has. If no word is left, the closest remaining ones
        follow. So each word of the pool is tried in place of the own ones, with as few other changes as
        possible: a wrong caption often has some words right, and loses to the one that corrects the others.
        Captions with the same words as `own` are never chosen.
        """
        own_words, own_triggers = words_of(own), self._triggers_in(own)
        composed = {
            each
            for each in self._composed(own)
            if each in self._usable and self._triggers_in(each) == own_triggers
        }
        # By hash, so that each place in the caption has its share of them.
        chosen = sorted((each for each in composed if words_of(each) != own_words), key=_hash)[:number]
        tried = own_words.union(*map(words_of, chosen))
        distances = {
            caption: self._distance(words, own_words)
            for caption, words in self._words.items()
            if words != own_words and caption not in chosen and self._triggers[caption] == own_triggers
        }
        while distances and len(chosen) < number:
            new = {caption: self._words[caption] - tried for caption in distances}
            # Of several, the one with the most new words; the hash, so that not all images get the same.
            best = min(
                distances,
                key=lambda caption, new=new: (
                    not new[caption],
                    distances[caption],
                    -self._sum(new[caption]),
                    _hash(own, caption),
                ),
            )
            chosen.append(best)
            tried |= self._words[best]
            del distances[best]
        return chosen

    def _composed(self, caption: str) -> Iterator[str]:
        """Yield the caption with one word exchanged, in any order and perhaps repeatedly."""
        for match in _WORD.finditer(caption):
            word = match[0].casefold()
            for other in self._exchangeable.get(word, ()):
                if other.casefold() != word:
                    before = _ARTICLE.sub(_article_of(other), caption[: match.start()])
                    yield f"{before}{other}{caption[match.end() :]}"

    def _distance(self, left: frozenset[str], right: frozenset[str]) -> float:
        """Return one minus the weighted Jaccard index of two sets of words."""
        union = self._sum(left | right)
        return 1.0 - self._sum(left & right) / union if union else 0.0

    def _sum(self, words: Iterable[str]) -> float:
        # A caption of an image may be outside of the pool, and so may its words.
        # Exact, because the order of a set, and so the rounding of a sum, differs between processes.
        return math.fsum(self._weights.get(word, 0.0) for word in words)


def words_of(caption: str) -> frozenset[str]:
    """Return the words of a caption, in lower case."""
    return frozenset(_WORD.findall(caption.casefold()))


def _exchangeable(captions: Iterable[str]) -> Mapping[str, frozenset[str]]:
    """Return the words that can be exchanged with each word, in the form in which captions have them."""
    forms: dict[str, str] = {}
    by_frame: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for caption in captions:
        found = _WORD.findall(caption)
        words = [each.casefold() for each in found]
        # "an orange cup" and "a red cup" differ in one word.
        frame = ["a" if word == "an" else word for word in words]
        for place, (word, form) in enumerate(zip(words, found, strict=True)):
            if len(words) > 1 and word not in FUNCTION_WORDS:
                # Of several forms, the one in lower case.
                forms[word] = max(form, forms.get(word, form))
                by_frame[*frame[:place], "", *frame[place + 1 :]].add(word)

    groups: dict[str, set[str]] = {}
    for words in by_frame.values():
        if len(words) > 1:
            group = words.union(*(groups.get(word, ()) for word in words))
            groups |= dict.fromkeys(group, group)
    return {word: frozenset(forms[each] for each in group) for word, group in groups.items()}


def _article_of(word: str) -> Callable[[re.Match[str]], str]:
    """Return a function that replaces an article by the one before the word."""
    article = "an" if word[0] in "aeiouAEIOU" else "a"
    return lambda match: article.capitalize() if match[0][0].isupper() else article


def _hash(*texts: Sequence[str] | str) -> bytes:
    return hashlib.sha256("\0".join(map(str, texts)).encode("utf-8", "surrogatepass")).digest()
