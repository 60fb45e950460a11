"""An executor that summarizes the run after its last step, in the process that started the steps.

It also lets a run be stopped while it waits for a place in a pool. Dagster's in-process executor captures
SIGINT and SIGTERM, and raises them only inside of a step. Without this, the run would continue to wait.
"""

import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
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


_STEP_STARTS = {DagsterEventType.STEP_START, DagsterEventType.STEP_RESTARTED}
_STEP_ENDS = {
    DagsterEventType.STEP_SUCCESS,
    DagsterEventType.STEP_FAILURE,
    DagsterEventType.STEP_UP_FOR_RETRY,
}


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

    After a pool has blocked a step, a signal counts whenever no step runs. Dagster ends running steps itself.

    Raises:
        DagsterExecutionInterruptedError: A signal arrived during such a wait, or before it.
    """
    is_blocked = is_running = False
    signals = _Signals()
    try:
        while True:
            with signals.raised(when=is_blocked and not is_running):
                event = next(events, None)
            if event is None:
                return
            yield event
            is_blocked = is_blocked or _is_blocked_by_pool(event)
            if event.event_type in _STEP_STARTS | _STEP_ENDS:
                is_running = event.event_type in _STEP_STARTS
    finally:
        signals.restore()


def _is_blocked_by_pool(event: DagsterEvent) -> bool:
    return event.event_type == DagsterEventType.ENGINE_EVENT and "pool" in event.engine_event_data.metadata


class _Signals:
    """Remembers SIGINT and SIGTERM, and passes them on to the former handlers unless they end a wait."""

    def __init__(self) -> None:
        self._former: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._received = False
        self._raises = False

    @contextmanager
    def raised(self, *, when: bool) -> Generator[None]:
        """If `when` is true, raise DagsterExecutionInterruptedError at a signal, or for an earlier one."""
        # Dagster may have restored its own handlers at the end of a step.
        self._handle_all()
        if when and self._received:
            raise DagsterExecutionInterruptedError
        self._raises = when
        try:
            yield
        finally:
            self._raises = False

    def restore(self) -> None:
        """Restore the former handlers."""
        for number, handler in self._former.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def _handle_all(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread receives signals
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            # Other handlers ignore the signal, or end the process at once.
            if callable(handler) and handler != self._handle:
                self._former[number] = handler
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        if self._raises:
            # A second signal must not interrupt the clean-up after the first one.
            self._raises = False
            raise DagsterExecutionInterruptedError
        self._former[number](number, frame)
