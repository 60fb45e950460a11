"""A realistic dataset folder: broken and unusual files and captions, each with its expected outcome.

Every image shows `PATTERN`. Its pixels need no decoder, so each case has exact expected pixels. The corpus is
deterministic.
"""

from __future__ import annotations

from pathlib import Path

from tests.corpus.accepted import animated, misnamed, modes, names, oriented, plain, profiles
from tests.corpus.drawing import Case
from tests.corpus.rejected import broken, captions, skipped


def all_cases() -> list[Case]:
    """Return all cases; their names are unique."""
    groups = (plain, oriented, modes, profiles, animated, misnamed, names, broken, skipped, captions)
    return [case for group in groups for case in group()]


def make(root: Path, cases: list[Case]) -> None:
    """Write the files and captions of `cases` below `root`."""
    for case in cases:
        path = root / case.name
        path.parent.mkdir(parents=True, exist_ok=True)
        case.put(path)
        if case.caption is not None:
            path.with_suffix(".txt").write_bytes(case.caption)
