"""The numbers of one optimizer step: on their way from the device, and on the host.

B is the number of slots of the step over all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.trained_lora.worker.loss import not_finite_error

if TYPE_CHECKING:
    from pipeline.trained_lora.plan.steps import StepPlan


@dataclass(frozen=True)
class StepOutcome:
    """Result of one optimizer step; identical on every rank.

    Attributes:
        loss: Mean over the samples of the step.
        grad_norm: Gradient norm before clipping; infinite if fp16's loss scaling skipped the step.
        learning_rate: Learning rate used in the step.
        stop: Whether any rank received a stop request.
        losses: Loss of each sample, indexed by slot.
        timesteps: Timestep of each sample, indexed by slot.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    stop: bool
    losses: tuple[float, ...]
    timesteps: tuple[float, ...]


class QueuedStep:
    """A step whose numbers the device may still be computing.

    Attributes:
        batch: The step.
        schedule_state: State of the learning-rate schedule before the step's update.
    """

    def __init__(
        self,
        batch: StepPlan,
        values: Tensor,
        grad_norm: Tensor,
        *,
        learning_rate: float,
        schedule_state: dict[str, Any],
    ) -> None:
        """Queue the copy of the numbers to the host; a GPU does not wait for it.

        Args:
            batch: The step.
            values: (3, B) on the device: losses, timesteps, and the number of stop requests in the first
                column.
            grad_norm: Gradient norm before clipping, a scalar on the device.
            learning_rate: Learning rate of the step.
            schedule_state: State of the schedule before the step's update.
        """
        self.batch = batch
        self.schedule_state = schedule_state
        self._learning_rate = learning_rate
        self._numbers = torch.cat([values.flatten(), grad_norm.detach().float().reshape(1)])
        # The copy from a GPU goes to pinned memory and does not block.
        self._on_host = self._numbers.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if self._numbers.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._numbers.device))
        self._outcome: StepOutcome | None = None

    @property
    def is_read(self) -> bool:
        """Whether `outcome` has returned before."""
        return self._outcome is not None

    def is_finite(self) -> Tensor:
        """Return whether all numbers are finite, a boolean scalar on the device."""
        return self._numbers.isfinite().all()

    def outcome(self, *, may_overflow: bool = False) -> StepOutcome:
        """Wait for the numbers and return them.

        Args:
            may_overflow: Whether the gradient norm may be infinite, as with fp16's loss scaling.

        Raises:
            TrainingError: The loss or the gradient is not finite; the error lists the samples.
        """
        if self._outcome is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._outcome = self._checked(self._on_host.tolist(), may_overflow=may_overflow)
        return self._outcome

    def _checked(self, numbers: list[float], *, may_overflow: bool) -> StepOutcome:
        batch, grad_norm = self.batch, numbers.pop()
        width = len(numbers) // 3
        losses, timesteps, stop_requests = (numbers[start : start + width] for start in (0, width, 2 * width))

        loss = math.fsum(losses) / batch.num_samples
        if not math.isfinite(loss):
            samples = [slot.variant_id for slot in batch.slots() if not math.isfinite(losses[slot.index])]
            raise not_finite_error("loss", batch.step, loss, samples)
        if not (math.isfinite(grad_norm) or may_overflow):
            samples = [slot.variant_id for slot in batch.slots()]
            raise not_finite_error("gradient", batch.step, grad_norm, samples)

        return StepOutcome(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=self._learning_rate,
            stop=stop_requests[0] > 0,
            losses=tuple(losses),
            timesteps=tuple(timesteps),
        )
