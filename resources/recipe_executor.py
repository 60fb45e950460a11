"""The executor of recipe runs: wraps the deployment's executor with what a run does once.

Before its first step, it records the machine, and follows the code server's death. During it, it keeps
databases open, and ends waits at signals. After it, it prints the summary, however the run ended.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, cast

import click
from dagster import (
    DagsterEvent,
    DagsterExecutionInterruptedError,
    DagsterInstance,
    Executor,
    ExecutorDefinition,
    in_process_executor,
)

from resources.blocked_executor import end_waits_at_signals
from resources.open_databases import open_databases
from resources.problems import INTERRUPTIONS
from resources.run_worker import end_with_code_server, lock_run, record_machine
from resources.step_names import step_asset
from resources.written_summary import print_summary

if TYPE_CHECKING:
    from dagster import InitExecutorContext

    from pipeline.recipe import Recipe

KUBERNETES_EXECUTOR = "k8s"
"""Name of `dagster_k8s.k8s_job_executor`, which runs steps in pods."""

COMMAND_TAG = "latentline/command"
"""Tag of a run that a person started at a terminal, with the command. A signal to its process cancels it.

All other runs that a signal interrupts have failed: Dagster's daemon may start them again.
"""


def recipe_executor(executor: ExecutorDefinition, recipes: Sequence[Recipe]) -> ExecutorDefinition:
    """Return the executor wrapped for runs of recipes; name, configuration and requirements stay."""
    create = executor.executor_creation_fn
    if create is None:
        return executor

    def create_wrapped(context: InitExecutorContext) -> Executor:
        return _RecipeExecutor(create(context), recipes, executor.name)

    # Undocumented: no public call wraps an executor, and only an executor sees the end of a run.
    return ExecutorDefinition(
        name=executor.name,
        config_schema=executor.config_schema,  # pyright: ignore[reportArgumentType] - as in Dagster's `configured`
        requirements=executor.get_requirements,
        executor_creation_fn=create_wrapped,
        description=executor.description,
    )


class _RecipeExecutor(Executor):
    """Delegates to another executor.

    Undocumented: Dagster reads both properties of each `Executor`.
    """

    def __init__(self, executor: Executor, recipes: Sequence[Recipe], name: str) -> None:
        self._executor = executor
        self._recipes = recipes
        self._name = name

    @property
    def retries(self) -> Any:
        return self._executor.retries

    @property
    def step_dependency_config(self) -> Any:
        return self._executor.step_dependency_config

    def execute(self, plan_context: Any, execution_plan: Any) -> Iterator[DagsterEvent]:
        instance, run_id = plan_context.instance, plan_context.run_id

        # At the start, because the first step may have to wait for its pool.
        if self._name != KUBERNETES_EXECUTOR:
            lock_run(instance, run_id)  # before the tags, by which others find the run
            record_machine(instance, run_id)
            end_with_code_server()

        events = self._executor.execute(plan_context, execution_plan)
        if self._name == in_process_executor.name:
            events = _with_interruptible_waits(events, instance, run_id)
        try:
            with open_databases(), self._imports_ahead(execution_plan):
                yield from events
        except (Exception, *INTERRUPTIONS) as err:
            if isinstance(err, INTERRUPTIONS):
                _record_cancellation(instance, run_id)
            self._print_summary(instance, run_id, err)
            raise
        self._print_summary(instance, run_id, None)

    def _imports_ahead(self, execution_plan: Any) -> AbstractContextManager[None]:
        if self._name != in_process_executor.name:
            return nullcontext()
        from resources.imports_ahead import imports_ahead  # imports Polars

        # Undocumented: only the plan has the steps of a run that executes some of a job's assets.
        steps = [step_asset(key) for key in execution_plan.step_keys_to_execute]
        for recipe in self._recipes:
            if assets := [asset for name, asset in steps if name == recipe.name]:
                with suppress(Exception):  # the steps report what they cannot read either
                    return imports_ahead(recipe, assets)
        return nullcontext()

    def _print_summary(self, instance: DagsterInstance, run_id: str, error: BaseException | None) -> None:
        # Dagster's commands use click. `latentline run` prints the summary itself, below its own output, and
        # the runs of the UI, of schedules and of sensors have no terminal.
        if click.get_current_context(silent=True) is not None:
            print_summary(instance, run_id, self._recipes, error=error)


def _record_cancellation(instance: DagsterInstance, run_id: str) -> None:
    # Dagster calls an interrupted run failed unless its cancellation was recorded before. A database that is
    # away must not prevent the stop.
    with suppress(Exception):
        run = instance.get_run_by_id(run_id)
        # A re-execution has the tags of its parent, but the daemon or the UI has started it.
        if run is not None and COMMAND_TAG in run.tags and run.parent_run_id is None:
            # Undocumented: the public way to cancel a run is a request to the process that executes it.
            instance.report_run_canceling(run, f"{run.tags[COMMAND_TAG]} was stopped by a signal.")


def _with_interruptible_waits(
    events: Iterator[DagsterEvent], instance: DagsterInstance, run_id: str
) -> Iterator[DagsterEvent]:
    try:
        yield from end_waits_at_signals(cast("Generator[DagsterEvent]", events))
    except DagsterExecutionInterruptedError:
        # Undocumented, as in gpu_pool.py. The step may have claimed its place just before the signal.
        instance.event_log_storage.free_concurrency_slots_for_run(run_id)
        raise
