"""Linear layers of the frozen base model that multiply 8-bit numbers.

torchao packs the weights and rounds the layer's input, so the product takes the GPU's 8-bit units:

    forward     y = round(x / s_x) @ round(W / s_w).T * s_x * s_w + b     in int8 or fp8
    backward    dL/dx = dL/dy @ (round(W / s_w) * s_w)                    in the dtype of dL/dy
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx
from torch.nn import functional

MIN_ROWS = 17
"""Fewest rows of x that are multiplied in 8 bits.

torch's int8 product on CUDA needs more than 16 (`_int_mm_out_cuda` in aten/src/ATen/native/cuda/Blas.cpp).
Layers with fewer rows are modulations, which take little time.
"""


class EightBitLinear(nn.Linear):
    """A frozen linear layer with a weight that torchao packed for 8-bit products."""

    def __init__(self, layer: nn.Linear) -> None:
        # Both weights are replaced at once, so that none is allocated.
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output in the dtype of `input`, shape (..., out_features).

        The error of the gradient with respect to `input` against float32 and unrounded weights is at most
        `|g| @ (s_w / 2)` for int8, with g = dL/dy, besides the rounding to the dtype of the gradient.
        """
        rows = input.numel() // input.shape[-1]
        if rows < MIN_ROWS:
            return functional.linear(input, unpacked(self.weight, input.dtype), self.bias)
        return cast("Tensor", _Product.apply(input, self.weight, self.bias))


class _Product(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Saved as a tensor, so that streamed blocks replace it by its place in its block.
        ctx.save_for_backward(weight)
        return functional.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        (gradient,) = gradients

        # The rounding of x has no derivative, so this is the gradient of the layer with rounded weights
        # (straight-through estimator, https://arxiv.org/abs/1308.3432). Weights are unpacked one layer at a
        # time.
        return gradient @ unpacked(weight, gradient.dtype), None, None


def use_eight_bit_products(network: nn.Module) -> None:
    """Replace the linear layers with weights that torchao packed for 8-bit products."""
    # Listed first, because replacing a layer changes `named_modules`.
    packed = [
        (name, module)
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and hasattr(module.weight, "__tensor_flatten__")
    ]
    for name, module in packed:
        network.set_submodule(name, EightBitLinear(module))


def unpacked(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight that torchao packed, (out_features, in_features) of `dtype`."""
    return cast("Any", weight).dequantize(dtype)
