"""Linear layers of the frozen base model that multiply 8-bit numbers.

torchao packs the weights while the base model is loaded. The layers hold its numbers as plain tensors, W8 of
8 bits and s_w of float32, and round their input in each pass:

    forward     y = round(x / s_x) @ W8.T * s_x * s_w + b     in int8 or fp8
    backward    dL/dx = dL/dy @ (W8 * s_w)                    in the dtype of dL/dy

int8 has a scale per row of x and of W8, fp8 one for all of x and one for all of W8. The results are those of
torchao's own layers. torchao's int8 product formats its input as text to find out whether it is a real
tensor, for which a GPU is waited for 36 times (https://github.com/pytorch/ao/issues/4872), and it takes 28
kernels.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional

MIN_ROWS = 17
"""Fewest rows of x that are multiplied in 8 bits.

torch's int8 product on CUDA needs more than 16 (`_int_mm_out_cuda` in aten/src/ATen/native/cuda/Blas.cpp).
Layers with fewer rows are modulations, which take little time.
"""

_MULTIPLE = 8
"""Number that divides both edges of a weight that torch's int8 product on CUDA takes."""

SMALLEST_SCALE = 2.0**-23
"""Scale of a row of zeros, as torchao has it."""

_FP8 = torch.float8_e4m3fn


class EightBitLinear(nn.Linear):
    """A frozen linear layer with a weight that torchao packed for 8-bit products.

    Attributes:
        weight: Packed weight as int8, (out_features, in_features). For fp8, these are the bytes of its
            numbers, because peft would give LoRA weights the dtype of a floating-point weight.
        scale: Scales of the weight's rows, float32 of shape (out_features, 1), or (1, 1) for fp8.
    """

    def __init__(self, layer: nn.Linear) -> None:
        # Both weights are replaced at once, so that none is allocated.
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        packed: Any = layer.weight
        self.is_fp8 = packed.qdata.dtype == _FP8
        self.weight = nn.Parameter(packed.qdata.contiguous().view(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(packed.scale.reshape(-1, 1), requires_grad=False)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output in the dtype of `input`, shape (..., out_features).

        The error of the gradient with respect to `input` against float32 and unrounded weights is at most
        `|g| @ (s_w / 2)` for int8, with g = dL/dy, besides the rounding to the dtype of the gradient.
        """
        return cast("Tensor", _Product.apply(input, self.weight, self.scale, self.bias, self.is_fp8))


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, is_fp8: bool
    ) -> Tensor:
        # Saved as tensors, so that streamed blocks replace them by their places in their block.
        ctx.save_for_backward(packed, scale)
        ctx.is_fp8 = is_fp8

        rows = hidden.reshape(-1, hidden.shape[-1])
        if len(rows) < MIN_ROWS or any(edge % _MULTIPLE for edge in packed.shape):
            return functional.linear(hidden, unpacked(packed, scale, is_fp8, hidden.dtype), bias)
        multiply = _fp8_product if is_fp8 else _int8_product
        return multiply(rows, packed, scale, bias).reshape(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        packed, scale = ctx.saved_tensors
        (gradient,) = gradients

        # The rounding of x has no derivative, so this is the gradient of the layer with rounded weights
        # (straight-through estimator, https://arxiv.org/abs/1308.3432). Weights are unpacked one layer at a
        # time.
        weight = unpacked(packed, scale, ctx.is_fp8, gradient.dtype)
        return gradient @ weight, None, None, None, None


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


def unpacked(packed: Tensor, scale: Tensor, is_fp8: bool, dtype: torch.dtype) -> Tensor:
    """Return the weight of an `EightBitLinear`, (out_features, in_features) of `dtype`."""
    numbers = packed.view(_FP8).float() if is_fp8 else packed

    # One kernel on a GPU, which multiplies in float32 and rounds on writing.
    weight = torch.empty(packed.shape, dtype=dtype, device=packed.device)
    return torch.mul(numbers, scale, out=weight)


def _int8_product(rows: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    rounded, row_scale = round_rows(rows)
    product = torch._int_mm(rounded, packed.t())  # pyright: ignore[reportPrivateUsage] - its only name
    del rounded  # before the output takes memory
    return rescale(product, row_scale, scale, bias, rows.dtype)


def _fp8_product(rows: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    largest = torch.finfo(_FP8).max
    row_scale = (rows.abs().amax() / largest).float().clamp(min=torch.finfo(torch.float32).tiny)
    rounded = rows.to(torch.float32, copy=True).div_(row_scale).clamp_(-largest, largest).to(_FP8)
    added = bias if rows.dtype != torch.float32 else None  # torch adds no bias to a product in float32
    product = torch._scaled_mm(  # pyright: ignore[reportPrivateUsage] - its only name before torch 2.10
        rounded,
        packed.view(_FP8).t(),
        scale_a=row_scale.reshape(1, 1),
        scale_b=scale,
        bias=added,
        out_dtype=rows.dtype,
        use_fast_accum=True,
    )
    return product if added is bias or bias is None else product + bias


@torch.library.custom_op("latentline::round_rows", mutates_args=())
def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (integers, scales) of rows (M, K): int8 of shape (M, K) and float32 of shape (M, 1)."""
    # An operator of its own, which is one kernel on a GPU; see `eight_bit_kernels`.
    scale = (rows.abs().amax(dim=1, keepdim=True) / 127.5).clamp(min=SMALLEST_SCALE).float()
    rounded = (rows * (1.0 / scale)).round().clamp(-128, 127)
    return rounded.to(torch.int8), scale


@torch.library.custom_op("latentline::rescale", mutates_args=())
def rescale(
    product: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the product of integers (M, N) times both scales, (M, 1) and (N, 1), plus the bias (N,)."""
    # torchao rounds to the layer's dtype between the two scales.
    output = (product * row_scale).to(dtype) * scale.flatten()
    return (output if bias is None else output + bias).to(dtype)


@round_rows.register_fake
def _(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape, dtype=torch.int8), rows.new_empty(len(rows), 1, dtype=torch.float32)


@rescale.register_fake
def _(product: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return product.new_empty(product.shape, dtype=dtype)
