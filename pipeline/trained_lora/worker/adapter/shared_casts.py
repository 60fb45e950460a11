"""One cast of a tensor for all LoRA layers that multiply it.

On CUDA, autocast computes norms in float32. Each layer after a norm, such as the queries, keys and values of
an attention, and the down matrix of its LoRA, would cast the same tensor to half precision again.

Predictions have the same bits as with separate casts. In the backward pass, the gradients of these layers are
added in half precision instead of float32, as for inputs that are in half precision already.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


def share_casts(network: nn.Module, dtype: torch.dtype) -> None:
    """Cast float32 inputs of LoRA layers to autocast's `dtype`, once for successive layers with one input."""
    cast = _SharedCast(dtype)
    for module in network.modules():
        # Other layers compute with the float32 input, see `add_lora`.
        if isinstance(module, LoraLayer) and not module.cast_input_dtype_enabled:
            module.register_forward_pre_hook(cast)


class _SharedCast:
    """Casts a tensor, and returns the same result for the same tensor while that exists."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._source: weakref.ref[Tensor] | None = None
        self._state: tuple[int, bool] | None = None
        self._result: Tensor | None = None

    def __call__(self, _layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden, *others = inputs

        # The compiler removes repeated casts from compiled blocks itself.
        if hidden.dtype != torch.float32 or torch.compiler.is_compiling():
            return None
        return self._cast(hidden), *others

    def _cast(self, hidden: Tensor) -> Tensor:
        # A tensor changed in place has another result. One without a graph has no gradient.
        state = (hidden._version, torch.is_grad_enabled())
        is_same = self._source is not None and self._source() is hidden
        if self._result is None or not is_same or self._state != state:
            self._result, self._state = hidden.to(self._dtype), state

            # Released with its source, so that it is not in memory for longer than the layers need it.
            self._source = weakref.ref(hidden, self._release)
        return self._result

    def _release(self, source: weakref.ref[Tensor]) -> None:
        if source is self._source:
            self._source = self._state = self._result = None
