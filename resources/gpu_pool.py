"""A place in a Dagster pool for the duration of a launch.

The cache steps are not in the pool themselves. Dagster would make them wait for it before they can find out
that no entry is missing, for example until another run has ended its training.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from resources.process_output import uninterrupted
from resources.step_log import step_log

if TYPE_CHECKING:
    from pathlib import Path

    from dagster import AssetExecutionContext

    from pipeline.processes.launch import Launch, Meanwhile

BY_RUN = (
    "the instance counts runs in its pools instead of steps, so an encoding may run beside a training "
    "(dagster.yaml, concurrency.pools.granularity): set it to op"
)

WAITING = "waiting for a step, of this or another run, that encodes or trains"

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0
"""Seconds between two attempts to claim a place; Dagster's executors have the same."""

_PRIORITY_TAG = "dagster/priority"
"""Dagster's tag for the priority of a run in its queue and in pools."""


class PoolLaunch:
    """A `Launch` that waits for a place in a pool, and holds it until the processes have ended."""

    def __init__(self, context: AssetExecutionContext, pool: str, launch: Launch) -> None:
        self._context, self._pool, self._launch = context, pool, launch
        self._is_held = False

    def __call__(self, module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
        """See `Launch.__call__`."""
        with nullcontext() if self._is_held else self.place():
            self._launch(module, job_file, meanwhile)

    @contextmanager
    def place(self) -> Generator[None]:
        """Wait for a place that all launches within the context share, also those of other threads.

        The main thread waits here before it starts threads, because signals interrupt no other thread.
        """
        with _place(self._context, self._pool):
            self._is_held = True
            try:
                yield
            finally:
                self._is_held = False


@contextmanager
def _place(context: AssetExecutionContext, pool: str) -> Generator[None]:
    # Undocumented, as in `_claim`. With run, Dagster holds back whole runs, but none of them for a place that
    # a step claims itself.
    granularity = context.instance.event_log_storage.get_pool_config().pool_granularity
    if granularity is not None and granularity.value == "run":
        step_log(context).warning(BY_RUN)
    try:
        pause_s = FIRST_PAUSE_S
        while not _claim(context, pool):
            if pause_s == FIRST_PAUSE_S:
                step_log(context).info(WAITING)
            time.sleep(pause_s)
            pause_s = min(1.1 * pause_s, LONGEST_PAUSE_S)
        yield
    finally:
        # Also the place in the queue of an interrupted wait, at which all later steps would wait.
        with uninterrupted():
            # Undocumented, as in `_claim`.
            storage = context.instance.event_log_storage
            storage.free_concurrency_slot_for_step(context.run.run_id, context.op_def.name)


def _claim(context: AssetExecutionContext, pool: str) -> bool:
    """Return whether this step has a place in the pool now; until then, it is in the pool's queue."""
    # Undocumented: a step cannot claim a place in a pool by a public call. The executors make the same ones.
    storage = context.instance.event_log_storage
    if not storage.supports_global_concurrency_limits:
        return True

    # The limit is read each time, because a person may change it during the wait.
    limit = next((each for each in storage.get_pool_limits() if each.name == pool), None)
    default = storage.get_pool_config().default_pool_limit
    if default is not None and (limit is None or (limit.from_default and limit.limit != default)):
        storage.initialize_concurrency_limit_to_default(pool)
    elif limit is None:
        return True

    tag = context.run.tags.get(_PRIORITY_TAG, "")
    priority = int(tag) if tag.removeprefix("-").isdecimal() else 0
    claim = storage.claim_concurrency_slot(pool, context.run.run_id, context.op_def.name, priority)
    return claim.is_claimed
