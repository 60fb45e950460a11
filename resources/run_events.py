"""The event log of one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dagster import DagsterEventType, DagsterInstance, EventLogEntry


def run_entries(instance: DagsterInstance, run_id: str, *types: DagsterEventType) -> Sequence[EventLogEntry]:
    """Return the entries of a run with an event of these types, by default all entries; the oldest first."""
    # Undocumented: no public call returns the events of one run.
    return instance.all_logs(run_id, of_type=set(types) or None)
