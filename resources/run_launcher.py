"""The run launcher of `.dagster/dagster.yaml`: Dagster's default, plus a health check of each run's process.

Dagster notices the death of a process that its own code server started, as long as that server lives. A run
whose server was killed as well, or that `dagster job execute` started, would stay "started" forever. It would
hold its place in the pool, and neither sensor nor schedule would start another run (FAILURES O08).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_type_hints

from dagster import (
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultRunLauncher,
    RunsFilter,
)

if TYPE_CHECKING:
    from dagster import EventLogEntry

# Dagster exports no name for the result of a health check; the overridden method's signature has the type.
HealthResult: Any = get_type_hints(DefaultRunLauncher.check_run_worker_health)["return"]
WorkerStatus: Any = get_type_hints(HealthResult)["status"]

CLOCK_TOLERANCE_S = 2.0
"""Seconds by which a process may appear to start after its first event; its start is counted in ticks."""


class WatchedRunLauncher(DefaultRunLauncher):
    """Launches runs as Dagster does by default, and reports to Dagster's run monitoring which processes live.

    It sees the processes of this machine only.
    """

    @property
    def supports_check_run_worker_health(self) -> bool:
        """See `RunLauncher.supports_check_run_worker_health`."""
        return True

    def check_run_worker_health(self, run: DagsterRun) -> Any:
        """Return RUNNING if the process that executes `run` lives, or if no event names it yet."""
        events = self._instance.all_logs(run.run_id, of_type=DagsterEventType.ENGINE_EVENT)
        for event in reversed(events):
            pid = _process_id(event)
            if pid is None:
                continue
            if _lived_at(pid, event.timestamp):
                return HealthResult(WorkerStatus.RUNNING)
            return HealthResult(WorkerStatus.NOT_FOUND, f"its process {pid} ended without reporting it")
        return HealthResult(WorkerStatus.RUNNING)


def end_dead_runs(instance: DagsterInstance) -> None:
    """Mark the started runs of dead processes as failed, and free their slots in the pool.

    Dagster's run monitoring does the same, but only while its daemon runs (`make ui`). Without it, a run
    would wait forever for the slot of a run that was killed. Nothing happens if `instance` has another run
    launcher, because its runs may be on other machines.
    """
    launcher = instance.run_launcher
    if not isinstance(launcher, WatchedRunLauncher):
        return
    for run in instance.get_runs(RunsFilter(statuses=[DagsterRunStatus.STARTED])):
        health = launcher.check_run_worker_health(run)
        if health.status == WorkerStatus.NOT_FOUND:
            instance.report_run_failed(run, f"The run has failed: {health.msg}.")
            instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)


def _process_id(event: EventLogEntry) -> int | None:
    """Return the process id in an engine event's metadata, or None."""
    metadata = event.get_dagster_event().engine_event_data.metadata
    value = metadata["pid"].value if "pid" in metadata else None
    return int(value) if isinstance(value, str) and value.isdecimal() else None


def _lived_at(pid: int, time_s: float) -> bool:
    """Return whether process `pid` lives and already did at `time_s`; the system may have reused the id."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.create_time() <= time_s + CLOCK_TOLERANCE_S
    except psutil.NoSuchProcess:
        return False
