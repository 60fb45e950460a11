"""Updates that a GPU skips by itself if the numbers of a step are not finite.

If the host checks the numbers before each update, the GPU has no work until the host has read them, started
the optimizer and begun the next forward pass. Here the host queues the update and the next step at once, and
reads the numbers later:

    host   step 0 | step 1 | read 0 | step 2     | read 1 | ...
    GPU           | step 0          | step 1              | step 2 ...

Only torch's fused optimizers can skip an update on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from pipeline.recipe import TrainingSettings


class UpdateOnDevice:
    """Updates of a fused optimizer; the first step that is not finite and all later ones change nothing.

    torch's gradient scaler gives a fused optimizer a flag on the device that makes it skip the update of its
    weights and its state. With the scale 1 the gradients stay as they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter]) -> None:
        """Prepare to update `weights` by `optimizer`: torch's own, not accelerate's wrapper."""
        self._optimizer = optimizer
        self._weights = weights
        device = weights[0].device
        self._scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
        self._scaler.scale(torch.zeros((), device=device))  # the scaler creates its state in the first call
        self._are_finite = torch.ones((), dtype=torch.bool, device=device)

    def step(self, is_finite: Tensor) -> None:
        """Queue an update, which takes place if `is_finite`, a boolean scalar, holds for all steps so far."""
        self._are_finite &= is_finite
        # The scaler looks for gradients that are not finite; one is enough to skip the update of all weights.
        gradient = self._weights[0].grad
        assert gradient is not None, "a step follows a backward pass"
        gradient.mul_(torch.where(self._are_finite, 1.0, math.nan))
        self._scaler.step(self._optimizer)
        self._scaler.update(1.0)

    def reset(self) -> None:
        """Update again after a step that was not finite; call it once the state before is restored."""
        self._are_finite.fill_(True)


def update_on_device(
    optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter], settings: TrainingSettings
) -> UpdateOnDevice | None:
    """Return the updates if the device can check them (see `can_skip_updates`), otherwise None."""
    can_skip = can_skip_updates(optimizer, settings, device=weights[0].device)
    return UpdateOnDevice(optimizer, weights) if can_skip else None


def can_skip_updates(
    optimizer: torch.optim.Optimizer, settings: TrainingSettings, *, device: torch.device
) -> bool:
    """Return whether a GPU can check updates: with torch's fused AdamW and without a moving average.

    An average would have to skip the step too. On a CPU nothing is gained.
    """
    is_fused = isinstance(optimizer, torch.optim.AdamW) and bool(optimizer.defaults["fused"])
    return is_fused and settings.ema_decay is None and device.type == "cuda"
