"""Path isolation of a recipe: its datasets, cache_dir and output_dir."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.storage import isolation
from pipeline.storage.isolation import NamedPath, PathConflict

if TYPE_CHECKING:
    from pipeline.recipe import Recipe


def check_isolation(recipe: Recipe) -> list[PathConflict]:
    """Return every conflict among the recipe's datasets, cache_dir and output_dir.

    Two datasets may contain one another. The folders need not exist, and nothing is written.
    """
    return isolation.check_isolation(_inputs(recipe), _outputs(recipe))


def require_isolation(recipe: Recipe) -> None:
    """Raise PathIsolationError unless datasets, cache_dir and output_dir are separate folders.

    Raises:
        PathIsolationError: Names both paths of each conflict, as written and as resolved.
    """
    isolation.require_isolation(_inputs(recipe), _outputs(recipe), where=str(recipe.source))


def _inputs(recipe: Recipe) -> list[NamedPath]:
    return [
        NamedPath(f"dataset {dataset.name}", f"datasets[{index}].{dataset.root_key}", dataset.root)
        for index, dataset in enumerate(recipe.datasets)
    ]


def _outputs(recipe: Recipe) -> list[NamedPath]:
    return [
        NamedPath("cache_dir", "cache_dir", recipe.cache_dir),
        NamedPath("output_dir", "output_dir", recipe.output_dir),
    ]
