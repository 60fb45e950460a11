"""The gate path_isolation, before any work: no dataset, cache_dir and output_dir lead into one another."""

from functools import lru_cache

from dagster import AssetCheckResult, AssetCheckSeverity

from pipeline.errors import PathIsolationError
from pipeline.recipe import Recipe
from pipeline.recipe.gates import PATH_ISOLATION


def isolation_result(run_id: str, recipe: Recipe) -> AssetCheckResult:
    """The check's result; a failure names both paths, as written and as resolved."""
    error = _conflict(run_id, recipe)  # pyright: ignore[reportArgumentType] - a frozen model is hashable
    name = PATH_ISOLATION.name
    if error is None:
        return AssetCheckResult(passed=True, check_name=name, description="all paths are apart")
    return AssetCheckResult(
        passed=False,
        check_name=name,
        severity=AssetCheckSeverity.ERROR,
        description=str(error),
        metadata={"what": error.what, "where": error.where, "fix": error.fix},
    )


def require_isolated(run_id: str, recipe: Recipe) -> None:
    """Return when all paths of `recipe` are apart; each step asks, whichever were selected.

    Raises:
        PathIsolationError: Two of the paths share, contain or lead into one another.
    """
    error = _conflict(run_id, recipe)  # pyright: ignore[reportArgumentType] - a frozen model is hashable
    if error is not None:
        raise error


@lru_cache(maxsize=8)
def _conflict(run_id: str, recipe: Recipe) -> PathIsolationError | None:
    # cached by run, because datasets are walked for links: one walk a run is enough
    del run_id
    from pipeline.recipe.isolation import require_isolation

    try:
        require_isolation(recipe)
    except PathIsolationError as err:
        return err
    return None
