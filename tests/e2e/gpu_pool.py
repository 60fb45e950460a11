"""The runs that hold the GPU pool or wait for it."""

from __future__ import annotations

from dagster import DagsterEventType, DagsterInstance

from assets.names import GPU_POOL


def holders(instance: DagsterInstance) -> set[str]:
    """Return the ids of the runs that hold the GPU pool."""
    info = instance.event_log_storage.get_concurrency_info(GPU_POOL)
    return {slot.run_id for slot in info.claimed_slots}


def is_blocked(instance: DagsterInstance, run_id: str) -> bool:
    """Return whether a step of the run waits for a pool."""
    entries = instance.all_logs(run_id, of_type=DagsterEventType.ENGINE_EVENT)
    return any("Step blocked by limit for pool" in entry.user_message for entry in entries)


def waiting(instance: DagsterInstance) -> set[str]:
    """Return the ids of the runs that wait for the GPU pool, and of those that hold it."""
    return {step.run_id for step in instance.event_log_storage.get_concurrency_info(GPU_POOL).pending_steps}
