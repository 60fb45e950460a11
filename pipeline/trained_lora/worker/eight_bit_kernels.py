"""The operators of `eight_bit` for a GPU, as one Triton kernel each.

They round where torch's own operators on CUDA round, so the bits are the same. Those take 14 kernels, each of
which reads and writes all values.
"""

# pyright: basic
# Triton compiles its functions from their source, whose types Python's do not describe.

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports] - part of torch's CUDA builds only
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from pipeline.trained_lora.worker.eight_bit import SMALLEST_SCALE, rescale, round_rows

_BLOCK = 1024
"""Number of values that a program of a kernel handles at a time."""


@triton.jit
def _round_rows(rows, rounded, scales, width, smallest, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)

    largest = tl.zeros([block], tl.float32)
    not_finite = tl.zeros([block], tl.float32)
    for start in range(0, width, block):
        mask = start + columns < width
        values = tl.load(rows + row * width + start + columns, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
        not_finite += values * 0.0

    # torch multiplies by the reciprocal where it divides by a number. The scale is rounded to the dtype of
    # the rows before it is used in float32.
    scale = (tl.max(largest, 0) * (1.0 / 127.5)).to(rows.dtype.element_ty).to(tl.float32)

    # A maximum ignores NaN. Here it must reach the loss, which ends the run.
    scale = tl.maximum(scale, smallest) + tl.sum(not_finite, 0)
    tl.store(scales + row, scale)
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), scale)

    for start in range(0, width, block):
        mask = start + columns < width
        values = tl.load(rows + row * width + start + columns, mask=mask, other=0.0).to(tl.float32)

        # float32 has no fraction from 2^23 on, so the sum is rounded to the nearest integer, ties to even.
        nearest = (values * inverse + 12582912.0) - 12582912.0
        nearest = tl.minimum(tl.maximum(nearest, -128.0), 127.0)
        tl.store(rounded + row * width + start + columns, nearest.to(tl.int8), mask=mask)


@triton.jit
def _rescale(  # noqa: PLR0913, PLR0917 - a kernel has no keyword arguments
    product,
    row_scales,
    scales,
    bias,
    output,
    width,
    has_bias: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    mask = columns < width
    dtype = output.dtype.element_ty
    values = tl.load(product + row * width + columns, mask=mask, other=0).to(tl.float32)
    values = (values * tl.load(row_scales + row)).to(dtype).to(tl.float32)
    values = values * tl.load(scales + columns, mask=mask, other=0.0)
    if has_bias:
        values = values + tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * width + columns, values.to(dtype), mask=mask)


def rounded_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """See `eight_bit.round_rows`."""
    rows = rows.contiguous()
    rounded = torch.empty_like(rows, dtype=torch.int8)
    scales = rows.new_empty(len(rows), 1, dtype=torch.float32)

    # With fused multiplications and additions, the last bits would differ from torch's.
    _round_rows[(len(rows),)](  # pyright: ignore[reportIndexIssue] - unless Triton is installed
        rows, rounded, scales, rows.shape[1], SMALLEST_SCALE, block=_BLOCK, enable_fp_fusion=False
    )
    return rounded, scales


def rescaled(
    product: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See `eight_bit.rescale`."""
    height, width = product.shape
    output = product.new_empty(product.shape, dtype=dtype)
    _rescale[(height, triton.cdiv(width, _BLOCK))](  # pyright: ignore[reportIndexIssue] - see above
        product,
        row_scale,
        scale,
        scale if bias is None else bias,
        output,
        width,
        has_bias=bias is not None,
        block=_BLOCK,
        enable_fp_fusion=False,
    )
    return output


def register() -> None:
    """Let tensors on GPUs use the kernels."""
    round_rows.register_kernel("cuda")(rounded_rows)
    rescale.register_kernel("cuda")(rescaled)
