"""Steps that a GPU may still be computing, whose numbers are read one step later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.trained_lora.worker.engine import QueuedStep, StepOutcome

if TYPE_CHECKING:
    from pipeline.trained_lora.plan.steps import StepPlan
    from pipeline.trained_lora.worker.engine import Engine


class UnreadSteps:
    """Reads and logs the numbers of steps in their order, without letting a GPU wait for the host."""

    def __init__(self, engine: Engine, log: Callable[[StepPlan, StepOutcome, float], None]) -> None:
        """Take the engine of the steps; `log` receives each step with its outcome and seconds."""
        self._engine = engine
        self._log = log
        self._steps: deque[tuple[QueuedStep, float]] = deque()
        self._last_read_s = 0.0

    @property
    def oldest(self) -> int | None:
        """Number of the oldest unread step."""
        return self._steps[0][0].batch.step if self._steps else None

    def add(self, step: QueuedStep, started_s: float) -> None:
        """Add a step that `Engine.start` returned; it began at `started_s` of `time.perf_counter`."""
        self._steps.append((step, started_s))

    def read(self, *, at_once: bool) -> bool:
        """Log all steps but the newest, and return whether any rank requested a stop in them.

        The newest step is included if its numbers are known, `at_once` is set, or the run stops.

        Raises:
            TrainingError: See `Engine.finish`; `oldest` is the step.
        """
        stopping = False
        while self._steps:
            step, started_s = self._steps[0]
            if len(self._steps) == 1 and not (step.is_read or at_once or stopping):
                break
            outcome = self._engine.finish(step)
            self._steps.popleft()

            # A GPU begins a step when it has ended the one before.
            read_s = time.perf_counter()
            self._log(step.batch, outcome, read_s - max(started_s, self._last_read_s))
            self._last_read_s = read_s
            stopping |= outcome.stop
        return stopping
