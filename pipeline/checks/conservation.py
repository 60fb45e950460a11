"""Conservation: what came into a stage is kept or rejected, each sample exactly once."""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from pipeline.checks.findings import Outcome


def conserved(before: Iterable[str], kept: Iterable[str], rejected: Iterable[str], stage: str) -> Outcome:
    """Whether `kept` and `rejected` share no sample id and together are `before`."""
    ids_in, ids_kept, ids_rejected = _distinct(before), _distinct(kept), _distinct(rejected)
    lost = _without(ids_in, ids_kept)
    strange = _without(ids_kept, ids_in)
    problems = {
        "lost": _without(lost, ids_rejected),
        "kept and rejected": ids_rejected.filter(ids_rejected.is_in(ids_kept.implode())),
        "never came in": pl.concat([strange, _without(ids_rejected, ids_in)]).unique(),
    }
    rows = [
        {"sample_id": sample_id, "problem": problem}
        for problem, ids in problems.items()
        for sample_id in ids.sort()
    ]
    numbers = {"in": len(ids_in), "kept": len(ids_kept), "rejected": len(ids_rejected)}
    summary = f"{len(ids_in):,} in, {len(ids_kept):,} kept, {len(ids_rejected):,} rejected"
    if not rows:
        return Outcome(True, summary, numbers=numbers)
    told = ", ".join(f"{len(ids):,} {problem}" for problem, ids in problems.items() if len(ids))
    fix = f"materialize {stage} and what it stands on again: its table is older than what came in"
    return Outcome(False, f"{summary}: {told}", fix, rows, numbers)


def _distinct(ids: Iterable[str]) -> pl.Series:
    """Each id once; as they are where they ascend."""
    names = ids if isinstance(ids, pl.Series) else pl.Series(list(ids), dtype=pl.String)
    return names if (names[:-1] < names[1:]).all() else names.unique(maintain_order=True)


def _without(ids: pl.Series, others: pl.Series) -> pl.Series:
    """The ids that are not among the others."""
    if ids.is_empty() or ids.equals(others):
        return ids.clear()
    return ids.filter(~ids.is_in(others.implode())) if len(others) else ids
