"""CUDA's autocast with bfloat16, imitated on the CPU as far as dtypes are concerned.

CPU autocast leaves norms in bfloat16, so it cannot show what CUDA's does. Each rule cites its line in the
header `ATen/autocast_mode.h` of the pinned torch, which `test_base_model.py` checks. Its twin in
`tests/gpu` compares the rule with a real GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"

LOWER_PRECISION = {
    "conv2d": (824, (functional.conv2d,)),
    "matmul": (835, (torch.matmul, Tensor.matmul, Tensor.__matmul__)),
    "linear": (840, (functional.linear,)),
    "bmm": (843, (torch.bmm, Tensor.bmm)),
    "scaled_dot_product_attention": (853, (functional.scaled_dot_product_attention,)),
}
"""Operations that run in bfloat16 (AT_FORALL_LOWER_PRECISION_FP): line in the header, and functions."""

FLOAT32 = {
    "rsqrt": (867, (torch.rsqrt, Tensor.rsqrt)),
    "pow, Tensor_Scalar": (870, (torch.pow, Tensor.pow, Tensor.__pow__)),
    "layer_norm": (874, (functional.layer_norm, torch.layer_norm)),
    "rms_norm": (876, (functional.rms_norm, torch.rms_norm)),
    "group_norm": (877, (functional.group_norm, torch.group_norm)),
    "softmax, int": (919, (functional.softmax, torch.softmax, Tensor.softmax)),
}
"""Operations that run in float32 (AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE); see `LOWER_PRECISION`."""

_DTYPES: dict[Any, torch.dtype] = {
    function: dtype
    for rules, dtype in ((LOWER_PRECISION, torch.bfloat16), (FLOAT32, torch.float32))
    for _, functions in rules.values()
    for function in functions
}


class ImitatedCudaAutocast(TorchFunctionMode):
    """Cast the floating-point arguments of the listed operations.

    Autocast works below Python, so an operation that a tensor subclass implements in Python, as torchao's
    weights implement `linear`, receives its arguments unchanged.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        dtype = _DTYPES.get(func)
        subclassed = any(hasattr(each, "__tensor_flatten__") for each in args)
        if dtype is None or subclassed:
            return func(*args, **(kwargs or {}))
        cast_args = [_cast(each, dtype) for each in args]
        return func(*cast_args, **{name: _cast(each, dtype) for name, each in (kwargs or {}).items()})


def calls(device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Return one call of each imitated operation, with inputs of the dtype that it does not compute in."""
    full = torch.randn(1, 4, 8, 8, device=device)
    half = full.bfloat16()
    return {
        "conv2d": lambda: functional.conv2d(full, full),
        "matmul": lambda: full @ full,
        "linear": lambda: functional.linear(full, full[0, 0]),
        "bmm": lambda: torch.bmm(full[0], full[0]),
        "scaled_dot_product_attention": lambda: functional.scaled_dot_product_attention(full, full, full),
        "rsqrt": half.rsqrt,
        "pow, Tensor_Scalar": lambda: half.pow(2),
        "layer_norm": lambda: functional.layer_norm(half, (8,)),
        "rms_norm": lambda: functional.rms_norm(half, (8,)),
        "group_norm": lambda: functional.group_norm(half, 2),
        "softmax, int": lambda: half.softmax(-1),
    }


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
