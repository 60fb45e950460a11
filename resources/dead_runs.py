"""End the runs of this machine that died without reporting it (docs/failures.md, O08).

Dagster notices the death of a process only while the code server that started it lives. All other dead runs
would stay "started", hold their place in the pool, and keep sensor and schedule from starting a run.
"""

from __future__ import annotations

import platform

from dagster import (
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultRunLauncher,
    EventLogEntry,
    RunsFilter,
)

from resources.run_events import run_entries
from resources.run_worker import (
    MACHINE_TAG,
    PID_NAMESPACE_TAG,
    has_machine,
    is_locked,
    pid_namespace,
    run_lock,
)

# The system counts the start of a process in ticks.
CLOCK_TOLERANCE_S = 2.0
"""Seconds by which a process may appear to start after its first event."""


_ACTIVE = (DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING)


def end_dead_runs(instance: DagsterInstance) -> list[str]:
    """Mark runs of dead processes of this machine as failed, free their pool slots, and return their ids.

    A run that was being canceled is marked as canceled.
    """
    # Undocumented: other launchers may start runs in containers, which number their processes separately.
    if not isinstance(instance.run_launcher, DefaultRunLauncher):
        return []
    ended: list[str] = []
    # Processes of other machines cannot be seen from here.
    of_this_machine = RunsFilter(statuses=list(_ACTIVE), tags={MACHINE_TAG: platform.node()})
    for record in instance.get_run_records(of_this_machine):
        pid = _dead_process(instance, record.dagster_run) if has_machine(record.dagster_run) else None
        if pid is None:
            continue

        # The process may have ended its run, or another machine taken it over, since the runs were listed.
        run = instance.get_run_by_id(record.dagster_run.run_id)
        if run is None or run.status not in _ACTIVE or run.tags.get(MACHINE_TAG) != platform.node():
            continue

        # Undocumented: run monitoring of the daemon does the same for launchers that can see the process.
        if run.status == DagsterRunStatus.CANCELING:
            instance.report_run_canceled(run, f"The run was canceled; its process {pid} has ended.")
        else:
            instance.report_run_failed(
                run, f"The run has failed: its process {pid} ended without reporting it."
            )
        instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
        run_lock(instance, run.run_id).unlink(missing_ok=True)
        ended.append(run.run_id)
    return ended


def _dead_process(instance: DagsterInstance, run: DagsterRun) -> int | None:
    """Return the id of the process that last executed `run`; None if it lives, or cannot be judged."""
    locked = is_locked(instance, run.run_id)
    if locked:
        return None
    # Without a lock, only the process id is left, which means something else in another container.
    namespace = pid_namespace()
    if locked is None and run.tags.get(PID_NAMESPACE_TAG, namespace) != namespace:
        return None

    for event in reversed(run_entries(instance, run.run_id, DagsterEventType.ENGINE_EVENT)):
        if (pid := _process_id(event)) is not None:
            is_dead = locked is False or not _lived_at(pid, event.timestamp)
            return pid if is_dead else None
    return None


def _process_id(event: EventLogEntry) -> int | None:
    metadata = event.get_dagster_event().engine_event_data.metadata
    value = metadata["pid"].value if "pid" in metadata else None
    return int(value) if isinstance(value, str) and value.isdecimal() else None


def _lived_at(pid: int, time_s: float) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False

        # The system may have given the id to another process since.
        return process.create_time() <= time_s + CLOCK_TOLERANCE_S
    except psutil.NoSuchProcess:
        return False
