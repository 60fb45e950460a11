"""Path isolation: no output of a run may overlap or link to another output or an input."""

from __future__ import annotations

from pipeline.storage.isolation.conflicts import (
    NamedPath,
    PathConflict,
    check_isolation,
    compare_paths,
    raise_conflicts,
)

__all__ = ["NamedPath", "PathConflict", "check_isolation", "compare_paths", "raise_conflicts"]
