"""T-LoRA: fewer ranks of a LoRA learn from noisier samples (https://arxiv.org/abs/2507.05964)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pipeline.errors import TrainingError
from pipeline.trained_lora.worker.adapter.lora import ADAPTER, lora_modules

if TYPE_CHECKING:
    from pipeline.recipe.lora import TimestepRankSettings


class TimestepRanks:
    """Masks the ranks of a denoiser's LoRA by the noise level of each sample, while a step is computed.

    With the timestep t of T, a sample uses the first r(t) ranks of a module's R
    (`get_mask_by_timestep` in tlora/trainer_sdxl.py of https://github.com/ControlGenAI/T-LoRA):

        r(t) = floor(((T - t) / T) ** power * (R - min_rank)) + min_rank
    """

    def __init__(self, denoiser: nn.Module, settings: TimestepRankSettings) -> None:
        """Register a hook on each down matrix; it does nothing outside of `applied`."""
        self._settings = settings
        self._signal: Tensor | None = None
        for name, layer in cast("list[tuple[str, Any]]", [*lora_modules(denoiser)]):
            layer.lora_A[ADAPTER].register_forward_hook(partial(self._mask, name))

    @contextmanager
    def applied(self, timesteps: Tensor, num_timesteps: int) -> Generator[None]:
        """Mask the ranks within the context, which includes the backward pass.

        `timesteps` (B,) are from 0, without noise, to `num_timesteps`.
        """
        # In float64, so that the product is rounded down as in Python.
        self._signal = (num_timesteps - timesteps.double()) / num_timesteps
        try:
            yield
        finally:
            self._signal = None

    def _mask(self, name: str, module: nn.Module, _inputs: Any, hidden: Tensor) -> Tensor | None:
        """Return `hidden` (B, ..., R), or (B, R, h, w) of a convolution, with zeros for masked ranks."""
        if self._signal is None:
            return None
        if len(hidden) != len(self._signal):
            raise TrainingError(
                f"lora.timestep_ranks cannot mask {name}: it computes {len(hidden)} rows for "
                f"{len(self._signal)} samples",
                where="training.lora.timestep_ranks",
                fix="exclude the module from training.lora.modules, or remove timestep_ranks",
            )
        dim = 1 if isinstance(module, nn.Conv2d) else hidden.ndim - 1
        ranks = num_ranks(self._signal, hidden.shape[dim], self._settings)
        is_used = torch.arange(hidden.shape[dim], device=hidden.device) < ranks[:, None]
        shape = [hidden.shape[each] if each in (0, dim) else 1 for each in range(hidden.ndim)]
        return hidden * is_used.reshape(shape)


def num_ranks(signal: Tensor, rank: int, settings: TimestepRankSettings) -> Tensor:
    """Return the number of ranks (B,) for samples with (T - t) / T in `signal` (B,), float64, 0 to 1."""
    least = min(settings.min_rank, rank)
    return (signal**settings.power * (rank - least)).long() + least
