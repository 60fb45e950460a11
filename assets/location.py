"""How recipes fit into a code location: pool, keys of resources, and executor of the jobs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dagster import AssetExecutionContext, ExecutorDefinition

from assets.names import DEFAULT_RUN_CONFIG, LAUNCHER_RESOURCE, TABLES_RESOURCE
from pipeline.recipe import Recipe
from resources.gpu_pool import PoolLaunch
from resources.local_launcher import AccelerateLauncher


@dataclass(frozen=True)
class Location:
    """What the graphs of all recipes in a code location have in common.

    Attributes:
        pool: Pool of the processes that may load a model.
        prefix: Start of the names that other definitions of the code location might have too.
        executor: Executor of the recipes' jobs; None for the one of the code location.
        job_config: Run configuration of the recipes' jobs.
    """

    pool: str
    prefix: str = ""
    executor: ExecutorDefinition | None = None
    job_config: Mapping[str, Any] = field(default_factory=lambda: DEFAULT_RUN_CONFIG)

    @property
    def tables(self) -> str:
        """Return the key of the table IO manager."""
        return f"{self.prefix}{TABLES_RESOURCE}"

    @property
    def launcher(self) -> str:
        """Return the key of the launcher; run configurations name it, see docs/operations.md."""
        return f"{self.prefix}{LAUNCHER_RESOURCE}"

    def launcher_of(self, context: AssetExecutionContext) -> AccelerateLauncher:
        """Return the launcher of a step that requires it."""
        return getattr(context.resources, self.launcher)

    def launch(self, context: AssetExecutionContext, recipe: Recipe) -> PoolLaunch:
        """Return a `Launch` of the step's launcher that waits for a place in the pool."""
        return PoolLaunch(context, self.pool, self.launcher_of(context).bind(context, recipe.accelerate))
