"""The run launcher of `.dagster/dagster.yaml`: Dagster's default, plus a health check of each run's process.

Dagster notices the death of a process that its own code server started, as long as that server lives. A run
whose server was killed as well, or that `dagster job execute` started, would stay "started" forever. It would
hold its place in the pool, and neither sensor nor schedule would start another run (FAILURES O08).

Processes of other machines cannot be seen from here, so a run of another machine counts as alive. That
machine ends it when it starts its next run.
"""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING, Any, get_type_hints

from dagster import (
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultRunLauncher,
    RunsFilter,
)

from resources.run_worker import MACHINE_TAG

if TYPE_CHECKING:
    from dagster import EventLogEntry

# Dagster exports no name for the result of a health check; the overridden method's signature has the type.
HealthResult: Any = get_type_hints(DefaultRunLauncher.check_run_worker_health)["return"]
WorkerStatus: Any = get_type_hints(HealthResult)["status"]

UNTAGGED_S = 60.0
"""Seconds in which a process tags its run with its machine. Until then the run counts as alive."""

CLOCK_TOLERANCE_S = 2.0
"""Seconds by which a process may appear to start after its first event; its start is counted in ticks."""


class WatchedRunLauncher(DefaultRunLauncher):
    """Launches runs as Dagster does by default, and tells Dagster's run monitoring which processes live."""

    @property
    def supports_check_run_worker_health(self) -> bool:
        """See `RunLauncher.supports_check_run_worker_health`."""
        return True

    def check_run_worker_health(self, run: DagsterRun) -> Any:
        """Return NOT_FOUND if a process of this machine executed `run` and is dead, and RUNNING otherwise."""
        machine = run.tags.get(MACHINE_TAG)
        if machine not in (None, platform.node()):
            return HealthResult(WorkerStatus.RUNNING)

        events = self._instance.all_logs(run.run_id, of_type=DagsterEventType.ENGINE_EVENT)
        for event in reversed(events):
            pid = _process_id(event)
            if pid is None:
                continue
            may_be_elsewhere = machine is None and time.time() < event.timestamp + UNTAGGED_S
            if may_be_elsewhere or _lived_at(pid, event.timestamp):
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
