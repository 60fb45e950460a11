"""Path isolation: inputs and outputs of a run never share, contain or lead into one another."""

from __future__ import annotations

from pipeline.storage.isolation.isolation import NamedPath, PathConflict, check_isolation, require_isolation

__all__ = ["NamedPath", "PathConflict", "check_isolation", "require_isolation"]
