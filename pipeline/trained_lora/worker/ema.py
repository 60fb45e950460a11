"""The weights that a run exports: the trained ones, or an average of them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

from pipeline.trained_lora.worker.optimizers import averages_weights

if TYPE_CHECKING:
    from pipeline.recipe import TrainingSettings


@contextmanager
def restored_afterwards(weights: Sequence[nn.Parameter]) -> Generator[None]:
    """Restore the weights bit for bit at the end of the context."""
    originals = [weight.detach().clone() for weight in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, original in zip(weights, originals, strict=True):
                weight.copy_(original)


class AveragedWeights:
    """An exponential moving average of the weights, schedule-free's built-in average, or neither.

    The moving average is diffusers' `EMAModel`: average <- decay * average + (1 - decay) * weight after each
    optimizer step, with decay at most (1 + step) / (10 + step), so that it follows the first steps closely.
    """

    def __init__(
        self, weights: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, settings: TrainingSettings
    ) -> None:
        """Average `weights`, which `optimizer` trains: the optimizer itself, not accelerate's wrapper."""
        self._weights = list(weights)
        self._averaging_optimizer: Any = optimizer if averages_weights(settings) else None
        self._ema: EMAModel | None = None
        if settings.ema_decay is not None:
            # One kernel for many weights. On a CPU nothing is gained, and the last bits would change.
            foreach = self._weights[0].device.type != "cpu"
            self._ema = EMAModel(self._weights, decay=settings.ema_decay, foreach=foreach)

    @property
    def num_updates(self) -> int:
        """Number of updates of the moving average, which decides its decay; settable, to undo updates."""
        return 0 if self._ema is None else self._ema.optimization_step

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        if self._ema is not None:
            self._ema.optimization_step = number

    def update(self) -> None:
        """Include the current weights; call it after each optimizer step."""
        if self._ema is not None:
            self._ema.step(self._weights)

    @torch.no_grad()
    def update_on_device(self, counts: Tensor) -> None:
        """Include the current weights if `counts`, a boolean scalar on their device, holds.

        The average is that of `update` on a GPU bit for bit, and the host does not wait for `counts`.
        """
        if self._ema is None:
            return
        self._ema.optimization_step += 1
        decay = self._ema.cur_decay_value = self._ema.get_decay(self._ema.optimization_step)

        # A difference of zero leaves the average as it is, and a factor of one is exact.
        shadows, weights = list[Tensor](self._ema.shadow_params), list[Tensor](self._weights)
        differences = list(torch._foreach_sub(shadows, weights))  # pyright: ignore[reportPrivateUsage] - torch has no public call for many tensors
        torch._foreach_mul_(differences, counts.float())  # pyright: ignore[reportPrivateUsage]
        torch._foreach_sub_(shadows, differences, alpha=1 - decay)  # pyright: ignore[reportPrivateUsage]

    @contextmanager
    def applied(self) -> Generator[None]:
        """Replace the weights by their average within the context; restore them bit for bit afterwards."""
        if self._ema is None and self._averaging_optimizer is None:
            yield
            return

        # schedule-free's `train` recomputes the weights and rounds them; the restored ones are exact.
        with restored_afterwards(self._weights):
            try:
                if self._averaging_optimizer is not None:
                    self._averaging_optimizer.eval()
                if self._ema is not None:
                    self._ema.copy_to(self._weights)
                yield
            finally:
                if self._averaging_optimizer is not None:
                    self._averaging_optimizer.train()

    def state(self) -> dict[str, Any]:
        """Return the state to save; empty unless there is a moving average."""
        return {} if self._ema is None else {"ema": self._ema.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Load what `state` returned; restore the weights first."""
        if self._ema is not None:
            self._ema.load_state_dict(state["ema"])
            self._ema.to(self._weights[0].device)
