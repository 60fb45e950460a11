"""Conservation: what came into a stage is kept or rejected, each sample exactly once."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.checks.base import Outcome


def conserved(before: Iterable[str], kept: Iterable[str], rejected: Iterable[str], stage: str) -> Outcome:
    """Whether `kept` and `rejected` share no sample id and together are `before`."""
    ids_in, ids_kept, ids_rejected = set(before), set(kept), set(rejected)
    problems = {
        "lost": ids_in - ids_kept - ids_rejected,
        "kept and rejected": ids_kept & ids_rejected,
        "never came in": (ids_kept | ids_rejected) - ids_in,
    }
    rows = [
        {"sample_id": sample_id, "problem": problem}
        for problem, ids in problems.items()
        for sample_id in sorted(ids)
    ]
    numbers = {"in": len(ids_in), "kept": len(ids_kept), "rejected": len(ids_rejected)}
    summary = f"{len(ids_in):,} in, {len(ids_kept):,} kept, {len(ids_rejected):,} rejected"
    if not rows:
        return Outcome(True, summary, numbers=numbers)
    told = ", ".join(f"{len(ids):,} {problem}" for problem, ids in problems.items() if ids)
    fix = f"materialize {stage} and what it stands on again: its table is older than what came in"
    return Outcome(False, f"{summary}: {told}", fix, rows, numbers)
