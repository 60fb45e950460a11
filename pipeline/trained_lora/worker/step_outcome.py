"""The result of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass


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
