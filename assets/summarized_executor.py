"""An executor that summarizes the run after its last step, in the process that started the steps.

`run_tables` does the same where resources are initialized. With steps in other processes or pods, the process
of the run initializes none, so the executor itself is extended.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from dagster import DagsterEvent, Executor, ExecutorDefinition, InitExecutorContext, in_process_executor

from assets.run_summary import add_summary
from pipeline.recipe import Recipe


def summarized(executor: ExecutorDefinition, recipes: Sequence[Recipe]) -> ExecutorDefinition:
    """Return the executor with a summary at its end; an in-process executor is returned unchanged.

    Args:
        executor: Executor with the same name, configuration and requirements.
        recipes: All recipes.
    """
    create = executor.executor_creation_fn
    if create is None or executor.name == in_process_executor.name:
        return executor

    def create_summarized(context: InitExecutorContext) -> Executor:
        return _SummarizedExecutor(create(context), recipes)

    return ExecutorDefinition(
        name=executor.name,
        config_schema=executor.config_schema,  # pyright: ignore[reportArgumentType] - as in Dagster's `configured`
        requirements=executor.get_requirements,
        executor_creation_fn=create_summarized,
        description=executor.description,
    )


class _SummarizedExecutor(Executor):
    """Delegates to another executor."""

    def __init__(self, executor: Executor, recipes: Sequence[Recipe]) -> None:
        self._executor = executor
        self._recipes = recipes

    @property
    def retries(self) -> Any:
        """See `Executor.retries`."""
        return self._executor.retries

    @property
    def step_dependency_config(self) -> Any:
        """See `Executor.step_dependency_config`."""
        return self._executor.step_dependency_config

    def execute(self, plan_context: Any, execution_plan: Any) -> Iterator[DagsterEvent]:
        """Execute the plan, then read the events of the run, however it ended."""
        try:
            yield from self._executor.execute(plan_context, execution_plan)
        finally:
            add_summary(plan_context.instance, plan_context.run_id, self._recipes)
