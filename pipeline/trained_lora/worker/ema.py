"""Which weights are the result: those that are stepped, or an average of them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from diffusers.training_utils import EMAModel
from torch import nn

from pipeline.trained_lora.worker.optimizers import averages_itself

if TYPE_CHECKING:
    from pipeline.recipe import TrainingSettings


class AveragedWeights:
    """An exponential moving average, schedule-free's own average, or none.

    The moving average is shadow <- decay * shadow + (1 - decay) * weight after each optimizer step. As in
    diffusers' `EMAModel`, decay is at most (1 + step) / (10 + step), so that it starts with the weights.
    """

    def __init__(
        self, weights: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, settings: TrainingSettings
    ) -> None:
        """Average `weights`, which `optimizer` steps.

        Args:
            weights: Float32; the same objects for as long as this lives.
            optimizer: Not wrapped by accelerate.
            settings: `ema_decay` and the optimizer's kind.
        """
        self._weights = list(weights)
        self._optimizer: Any = optimizer if averages_itself(settings) else None
        self._ema = None if settings.ema_decay is None else EMAModel(self._weights, decay=settings.ema_decay)

    def stepped(self) -> None:
        """Take in the weights after an optimizer step."""
        if self._ema is not None:
            self._ema.step(self._weights)

    @contextmanager
    def result(self) -> Generator[None]:
        """Inside, the weights are the result; afterwards training goes on with its own, bit for bit."""
        if self._ema is None and self._optimizer is None:
            yield
            return
        kept = [weight.detach().clone() for weight in self._weights]
        try:
            if self._optimizer is not None:
                self._optimizer.eval()
            if self._ema is not None:
                self._ema.copy_to(self._weights)
            yield
        finally:
            if self._optimizer is not None:
                self._optimizer.train()
            with torch.no_grad():
                for weight, before in zip(self._weights, kept, strict=True):
                    weight.copy_(before)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs; empty where the optimizer's own state holds everything."""
        return {} if self._ema is None else {"ema": self._ema.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave; the weights are restored already."""
        if self._ema is not None:
            self._ema.load_state_dict(state["ema"])
            self._ema.to(self._weights[0].device)
