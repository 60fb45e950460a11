"""An independent accounting of a training step's memory: every operator below autograd, on fake tensors.

It shares nothing with the forecast but the model classes. A dispatch mode sees each operator of the forward
and of the backward pass, with the tensors that it allocates. It uses private parts of torch and is slow.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

HALF = ("linear", "conv2d")
FLOAT32 = ("layer_norm", "group_norm", "rms_norm", "softmax")
"""Functions that modules call, by the dtype that CUDA's autocast casts their inputs to."""


class Allocations(TorchDispatchMode):
    """Bytes of all live storages that operators create."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else [result]:
            if isinstance(each, Tensor):
                self.add(each)
        return result

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            weakref.finalize(storage, self._remove, key)
            self.live_bytes += self._alive[key]
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _remove(self, key: int) -> None:
        self.live_bytes -= self._alive.pop(key)


@contextmanager
def cuda_functions() -> Generator[None]:
    """Run attention by the fused kernel, and cast the inputs of functions as CUDA's autocast does."""

    def flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Tensor:
        half = [each.to(torch.bfloat16) for each in (query, key, value)]
        return torch.ops.aten._scaled_dot_product_flash_attention(*half)[0]

    def casting(function: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            def cast(value: Any) -> Any:
                is_float = isinstance(value, Tensor) and value.is_floating_point()
                return value.to(dtype) if is_float else value

            return function(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

        return run

    with ExitStack() as stack:
        stack.enter_context(patch.object(functional, "scaled_dot_product_attention", flash))

        # peft's LoHa and LoKr compare a random number with their dropout, and fake tensors have no values.
        stack.enter_context(patch.object(torch, "rand", lambda _: 1.0))
        for names, dtype in ((HALF, torch.bfloat16), (FLOAT32, torch.float32)):
            for name in names:
                stack.enter_context(patch.object(functional, name, casting(getattr(functional, name), dtype)))
        yield


def step_peak_bytes(
    make: Callable[[], nn.Module],
    predict: Callable[[nn.Module], Tensor],
    *,
    adapter: Any,
    checkpointing: bool,
) -> int:
    """Return the peak bytes of two training steps with AdamW, weights and optimizer state included.

    Args:
        make: Creates the network in bfloat16, on the default device.
        predict: Runs the network on inputs that it creates on the default device.
        adapter: peft's configuration.
        checkpointing: Whether activations are recomputed.
    """
    with torch.device("meta"):
        network: Any = make().requires_grad_(False).train()
        network.add_adapter(adapter)
    for weight in network.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    if checkpointing:
        network.enable_gradient_checkpointing()

    allocations = Allocations()
    with FakeTensorMode(allow_non_fake_inputs=True), allocations, cuda_functions():
        network.to_empty(device="cpu")
        weights = [weight for weight in network.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, foreach=False)
        for _ in range(2):
            prediction = predict(network)
            errors = (prediction.float() - torch.zeros(prediction.shape)) ** 2
            errors.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return allocations.peak_bytes


def preview_peak_bytes(
    make: Callable[[], nn.Module],
    make_vae: Callable[[], nn.Module],
    draw: Callable[[nn.Module, nn.Module], Tensor],
    *,
    adapter: Any,
) -> int:
    """Return the peak bytes of a preview after a training step with AdamW, with weights and optimizer state.

    Args:
        make: Creates the network in bfloat16, on the default device.
        make_vae: Creates the VAE in float32, on the default device.
        draw: Returns the pixels that the network and the VAE draw.
        adapter: peft's configuration.
    """
    with torch.device("meta"):
        network: Any = make().requires_grad_(False)
        network.add_adapter(adapter)
        vae = make_vae().requires_grad_(False)
    for weight in network.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()

    allocations = Allocations()
    with FakeTensorMode(allow_non_fake_inputs=True), allocations, torch.no_grad():
        network.to_empty(device="cpu")
        weights = [weight for weight in network.parameters() if weight.requires_grad]
        states = [torch.zeros_like(weight) for weight in weights for _ in ("exp_avg", "exp_avg_sq")]
        vae.to_empty(device="cpu")
        draw(network, vae)
    assert len(states) == 2 * len(weights)
    return allocations.peak_bytes
