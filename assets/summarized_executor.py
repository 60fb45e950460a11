"""An executor that summarizes the run after its last step, in the process that started the steps.

It also lets a run be stopped while it waits for a place in a pool. Dagster's in-process executor captures
SIGINT and SIGTERM, and raises them only inside of a step. Without this, the run would continue to wait.
"""

import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dagster import (
    DagsterEvent,
    DagsterEventType,
    DagsterExecutionInterruptedError,
    Executor,
    ExecutorDefinition,
    InitExecutorContext,
    in_process_executor,
)

from assets.run_summary import add_summary
from pipeline.recipe import Recipe
from resources.run_worker import end_with_code_server, record_machine

KUBERNETES_EXECUTOR = "k8s"
"""Name of `dagster_k8s.k8s_job_executor`, whose steps run in pods."""


def summarized(executor: ExecutorDefinition, recipes: Sequence[Recipe]) -> ExecutorDefinition:
    """Return the executor with a summary at its end, and with waits for a pool that a signal can end.

    Args:
        executor: Executor with the same name, configuration and requirements.
        recipes: All recipes.
    """
    create = executor.executor_creation_fn
    if create is None:
        return executor

    def create_summarized(context: InitExecutorContext) -> Executor:
        return _SummarizedExecutor(create(context), recipes, executor.name)

    return ExecutorDefinition(
        name=executor.name,
        config_schema=executor.config_schema,  # pyright: ignore[reportArgumentType] - as in Dagster's `configured`
        requirements=executor.get_requirements,
        executor_creation_fn=create_summarized,
        description=executor.description,
    )


class _SummarizedExecutor(Executor):
    """Delegates to another executor."""

    def __init__(self, executor: Executor, recipes: Sequence[Recipe], name: str) -> None:
        self._executor = executor
        self._recipes = recipes
        self._name = name

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
        instance, run_id = plan_context.instance, plan_context.run_id
        if self._name != KUBERNETES_EXECUTOR:
            record_machine(instance, run_id)
            end_with_code_server()

        events = self._executor.execute(plan_context, execution_plan)
        try:
            if self._name == in_process_executor.name:
                events = _with_waits_that_end(events)
            yield from events
        except DagsterExecutionInterruptedError:
            # The step may have claimed its place in the pool just before the signal. With other executors,
            # a process may still use it.
            if self._name == in_process_executor.name:
                instance.event_log_storage.free_concurrency_slots_for_run(run_id)
            raise
        finally:
            add_summary(instance, run_id, self._recipes)


def _with_waits_that_end(events: Iterator[DagsterEvent]) -> Iterator[DagsterEvent]:
    """Yield the events of an in-process executor; SIGINT and SIGTERM end a wait for a pool.

    Raises:
        DagsterExecutionInterruptedError: A signal arrived during such a wait.
    """
    event = next(events, None)
    while event is not None:
        yield event
        if _is_blocked_by_pool(event):
            with _raised_signals():
                event = next(events, None)
        else:
            event = next(events, None)


def _is_blocked_by_pool(event: DagsterEvent) -> bool:
    return event.event_type == DagsterEventType.ENGINE_EVENT and "pool" in event.engine_event_data.metadata


@contextmanager
def _raised_signals() -> Generator[None]:
    """Raise DagsterExecutionInterruptedError at SIGINT and SIGTERM; only the main thread receives them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def restore() -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        # A second signal must not interrupt the clean-up after the first one.
        restore()
        raise DagsterExecutionInterruptedError

    numbers = (signal.SIGINT, signal.SIGTERM)
    former = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            signal.signal(number, interrupt)
        yield
    finally:
        restore()
