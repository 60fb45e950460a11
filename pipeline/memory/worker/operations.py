"""Kernels, bytes and floating-point operations of a training step and of encoding, without any data.

Each operator that reads or writes memory counts as one kernel of eager execution; views and allocations start
none. Matrix products, convolutions and attention are counted by their operations, all other kernels by the
bytes of their inputs and outputs. Bytes are a lower bound, because fused RMS norms are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # its documented place, in spite of the name
from torch.utils.flop_counter import flop_registry

from pipeline.memory.gpus import Work
from pipeline.trained_lora.worker.memory.cuda_rules import CudaRules
from pipeline.trained_lora.worker.memory.skeletons import skeleton

if TYPE_CHECKING:
    from pipeline.images.geometry import Size
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.worker.memory.training import TrainingForecast, Variant

_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")

_ATTENTION_BACKWARD = 2.5
"""Operations of a fused attention's backward pass relative to its forward pass: five products for two."""


class Operations(TorchDispatchMode):
    """Counts the operators of all passes within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self._kernels = self._flops = self._moved_bytes = self._cast_bytes = 0

    def work(self, *, num_forward: int = 1, has_backward: bool = False) -> Work:
        """Return the counts of a step; with checkpointing, it has two forward passes."""
        forward = self.attention.flops
        backward = _ATTENTION_BACKWARD * forward / num_forward if has_backward else 0
        return Work(self._kernels, self._flops, int(forward + backward), self._moved_bytes, self._cast_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs = list(_tensors((args, list((kwargs or {}).values()))))
        outputs = list(_tensors(result))
        if not outputs or func.is_view or name in _ALLOCATIONS or all(each.numel() == 0 for each in outputs):
            return result

        self._kernels += 1
        if (operations := flop_registry.get(func.overloadpacket)) is not None:
            self._flops += operations(*args, **(kwargs or {}), out_val=result)
            return result
        num_bytes = sum(each.nbytes for each in inputs + outputs)
        self._moved_bytes += num_bytes
        if name == "_to_copy" and inputs[0].dtype != outputs[0].dtype:
            self._cast_bytes += num_bytes
        return result


class Attention(TorchFunctionMode):
    """Counts the operations of attention in forward passes: two products of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func.__name__ == "scaled_dot_product_attention":
            query, key, value = (
                *args,
                *(given[name] for name in ("query", "key", "value") if name in given),
            )[:3]
            products = query.shape[-1] + value.shape[-1]
            self.flops += 2 * query.shape[:-1].numel() * key.shape[-2] * products
        return func(*args, **given)


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or results of an operator, also of lists of tensors."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _tensors(each)


def step_work(forecast: TrainingForecast, variant: Variant) -> Work:
    """Return the work of a training step whose base weights are not packed, without the optimizer."""
    operations = Operations()
    forecast.run_step(variant, all_passes=operations, forward=lambda: operations.attention)
    return operations.work(num_forward=2 if variant.checkpointing else 1, has_backward=True)


def latent_work(family: WorkerFamily, size: Size, dtype: str) -> Work:
    """Return the work of encoding one image of this size by a VAE in `dtype`."""
    vae, operations = skeleton(family, "vae", dtype), Operations()
    pixels = torch.empty(1, 3, size.height, size.width, device="meta")
    with operations, CudaRules(None), operations.attention:
        family.vae.posterior(vae, pixels)
    return operations.work()
