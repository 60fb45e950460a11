"""The runs that hold the GPU pool or wait for it."""

from __future__ import annotations

from dagster import DagsterInstance

from assets.names import GPU_POOL


def occupy(instance: DagsterInstance) -> None:
    """Claim the only place of the GPU pool for the run "another"."""
    storage = instance.event_log_storage
    storage.set_concurrency_slots(GPU_POOL, 1)
    assert storage.claim_concurrency_slot(GPU_POOL, "another", "its_trained_lora").is_claimed


def holders(instance: DagsterInstance, pool: str = GPU_POOL) -> set[str]:
    """Return the ids of the runs that hold the pool."""
    info = instance.event_log_storage.get_concurrency_info(pool)
    return {slot.run_id for slot in info.claimed_slots}


def waiting(instance: DagsterInstance) -> set[str]:
    """Return the ids of the runs that wait for the GPU pool, and of those that hold it."""
    return {step.run_id for step in instance.event_log_storage.get_concurrency_info(GPU_POOL).pending_steps}
