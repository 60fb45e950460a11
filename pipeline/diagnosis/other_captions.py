"""The captions of other images under which an image's loss is measured too."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

MAX_POOL = 256
"""Maximum number of captions from which the others of an image are chosen."""

_WORD = re.compile(r"\w+")


class CaptionPool:
    """Distinct captions of a dataset, and how much their words differ."""

    def __init__(self, captions: Iterable[str]) -> None:
        # By hash, so that a large dataset gives a sample that names and order do not decide.
        distinct = sorted({*captions} - {""}, key=_hash)[:MAX_POOL]
        self._words = {caption: words_of(caption) for caption in distinct}
        counts = Counter(word for words in self._words.values() for word in words)

        # The inverse document frequency: words that most captions have in common distinguish none of them.
        self._weights = {word: math.log((1 + len(distinct)) / count) for word, count in counts.items()}

    def others(self, own: str, number: int) -> list[str]:
        """Return at most `number` captions for comparison with `own`, in the order of their choice.

        Each one is the closest to `own` that has a word which neither `own` nor an earlier one has. If no
        word is left, the closest remaining ones follow. So each word of the pool is tried in place of the
        own ones, with as few other changes as possible: a wrong caption often has some words right, and
        loses to the one that corrects the others. Captions with the same words as `own` are never chosen.
        """
        own_words = words_of(own)
        distances = {
            caption: self._distance(words, own_words)
            for caption, words in self._words.items()
            if words != own_words
        }
        tried, chosen = own_words, list[str]()
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


def _hash(*texts: Sequence[str] | str) -> bytes:
    return hashlib.sha256("\0".join(map(str, texts)).encode("utf-8", "surrogatepass")).digest()
