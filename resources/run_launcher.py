"""The run launcher of `.dagster/dagster.yaml`: Dagster's own, which also knows when a run's process is gone.

Dagster notices the death of a process that its own code server has started, as long as that server lives. A
run whose server was killed too, or that `dagster job execute` had started, would stay "started" for ever: it
would hold its place in the pool, and neither sensor nor schedule would start another (FAILURES O08).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster import DagsterEventType, DagsterRun, DefaultRunLauncher
from dagster._core.launcher.base import CheckRunHealthResult, WorkerStatus

if TYPE_CHECKING:
    from dagster import EventLogEntry

NUM_EVENTS = 50
"""Of the engine, the newest, among which a run's process is looked for."""

CLOCK_TOLERANCE_S = 2.0
"""By which a process may seem younger than its own first event: its start is counted in ticks since boot."""


class WatchedRunLauncher(DefaultRunLauncher):
    """Launches runs as Dagster does by default, and tells the run monitor which of them still have a process.

    For processes of this machine only.
    """

    @property
    def supports_check_run_worker_health(self) -> bool:
        """True: the run monitor may ask."""
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        """Whether the process that executes `run` lives; a run that has not named its process yet does."""
        events = self._instance.event_log_storage.get_logs_for_run(
            run.run_id, of_type={DagsterEventType.ENGINE_EVENT}, limit=NUM_EVENTS, ascending=False
        )
        for event in events:
            pid = _pid(event)
            if pid is None:
                continue
            if _lived_at(pid, event.timestamp):
                return CheckRunHealthResult(WorkerStatus.RUNNING)
            return CheckRunHealthResult(WorkerStatus.NOT_FOUND, f"its process {pid} has ended without a word")
        return CheckRunHealthResult(WorkerStatus.RUNNING)


def _pid(event: EventLogEntry) -> int | None:
    """The process that an event of the engine names."""
    metadata = event.get_dagster_event().engine_event_data.metadata
    value = metadata["pid"].value if "pid" in metadata else None
    return int(value) if isinstance(value, str) and value.isdecimal() else None


def _lived_at(pid: int, moment_s: float) -> bool:
    """Whether process `pid` lives and did at `moment_s`: a number may have been given out again."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.create_time() <= moment_s + CLOCK_TOLERANCE_S
    except psutil.NoSuchProcess:
        return False
