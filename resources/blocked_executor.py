"""Let SIGINT and SIGTERM end a run that waits in Dagster's in-process executor, for a pool or a retry.

docs/dagster_blocked_executor.md describes the defect. Remove this module when Dagster has corrected it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator
from types import FrameType

from dagster import DagsterEvent, DagsterEventType, DagsterExecutionInterruptedError

_STARTS = {DagsterEventType.STEP_START, DagsterEventType.STEP_RESTARTED}
_ENDS = {DagsterEventType.STEP_SUCCESS, DagsterEventType.STEP_FAILURE, DagsterEventType.STEP_UP_FOR_RETRY}


def end_waits_at_signals(events: Generator[DagsterEvent]) -> Iterator[DagsterEvent]:
    """Yield the events of an in-process executor; after a pool or a retry has, a signal ends any wait.

    Raises:
        DagsterExecutionInterruptedError: A signal arrived while a step was blocked and none was running.
    """
    is_blocked = is_running = is_waiting = has_signal = False
    dagsters: dict[int, Callable[[int, FrameType | None], object]] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_waiting, has_signal
        has_signal = True
        if is_waiting:
            # A second signal must not interrupt the clean-up after the first one.
            is_waiting = False
            raise DagsterExecutionInterruptedError
        dagsters[number](number, frame)

    try:
        while True:
            # Dagster sets its own handlers around each step.
            _handle_signals(handle, dagsters)

            # While a step runs, Dagster itself interrupts it. Between steps, it only records the signal for
            # the next step, which a full pool may never start.
            is_waiting = is_blocked and not is_running
            if is_waiting and has_signal:
                # Raised within the executor, so that it first restores the output that it captures.
                is_waiting = has_signal = False
                event = events.throw(DagsterExecutionInterruptedError())
            else:
                event = next(events, None)
            is_waiting = False

            if event is None:
                return
            is_blocked = is_blocked or _is_blocked_by_pool(event) or _waits_for_retry(event)
            if event.event_type in _STARTS | _ENDS:
                is_running = event.event_type in _STARTS
            yield event
    finally:
        is_waiting = False
        for number, handler in dagsters.items():
            if signal.getsignal(number) == handle:
                signal.signal(number, handler)


def _waits_for_retry(event: DagsterEvent) -> bool:
    return event.event_type == DagsterEventType.STEP_UP_FOR_RETRY


def _is_blocked_by_pool(event: DagsterEvent) -> bool:
    return event.event_type == DagsterEventType.ENGINE_EVENT and "pool" in event.engine_event_data.metadata


def _handle_signals(
    handle: Callable[[int, FrameType | None], object],
    former: dict[int, Callable[[int, FrameType | None], object]],
) -> None:
    """Set the handler of SIGINT and SIGTERM, and store each handler that it replaces in `former`."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread receives signals
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        # Handlers that are not functions ignore the signal, or end the process at once.
        if callable(handler) and handler != handle:
            former[number] = handler
            signal.signal(number, handle)
