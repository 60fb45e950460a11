"""A folder as people really have it: broken and odd files and captions, and what must become of each.

Every image shows `PATTERN`, whose pixels are known without a decoder, so that each repair has an expectation
of its own. Nothing is drawn at random.
"""

from __future__ import annotations

from pathlib import Path

from tests.corpus.drawing import Case
from tests.corpus.sound import animated, misnamed, modes, names, oriented, plain, profiles
from tests.corpus.unfit import broken, captions, passed_over


def all_cases() -> list[Case]:
    """Every case, each name once."""
    makers = (plain, oriented, modes, profiles, animated, misnamed, names, broken, passed_over, captions)
    return [case for maker in makers for case in maker()]


def make(root: Path, cases: list[Case]) -> None:
    """Put the cases below `root`, with their captions."""
    for case in cases:
        path = root / case.name
        path.parent.mkdir(parents=True, exist_ok=True)
        case.put(path)
        if case.caption is not None:
            path.with_suffix(".txt").write_bytes(case.caption)
