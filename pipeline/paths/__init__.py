"""Where things lie: datasets, cache_dir and output_dir, and that they lie apart."""

from __future__ import annotations

from pipeline.paths.isolation import PathConflict, check_isolation, require_isolation

__all__ = ["PathConflict", "check_isolation", "require_isolation"]
