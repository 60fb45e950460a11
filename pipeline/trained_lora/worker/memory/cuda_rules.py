"""How CUDA treats dtypes and memory where the meta device differs.

The meta device has no autocast, materialises the weights of attention, and has no packed weights. These rules
imitate CUDA's. Autocast's lists are from `ATen/autocast_mode.h` in torch 2.13.

Tensors made from Python's numbers stay on the CPU, because masks and indices among them decide shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, cast

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

Packing = Literal["dequantized_again", "dequantized_once", "multiplied"]
"""Whether a packed layer unpacks its weight again in the backward pass (bitsandbytes), autograd keeps the
unpacked weight of the forward pass (torchao), or the forward pass multiplies 8-bit numbers."""

_LOWER = frozenset(
    [
        "linear",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "mm",
        "bmm",
        "baddbmm",
        "addmm",
        "addbmm",
        "einsum",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "prelu",
        "scaled_dot_product_attention",
    ]
)
"""Operators that run in half precision: AT_FORALL_LOWER_PRECISION_FP."""

_FLOAT32 = frozenset(
    [
        "acos",
        "asin",
        "exp",
        "log",
        "reciprocal",
        "rsqrt",
        "pow",
        "__pow__",
        "softplus",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "mse_loss",
        "logsumexp",
        "interpolate",
        "prod",
        "softmax",
        "log_softmax",
        "cumprod",
        "cumsum",
        "norm",
        "sum",
    ]
)
"""Operators that run in float32: AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE."""


_POSITIONS = ("ErnieImageEmbedND3", "Ideogram4MRoPE")
"""Classes of layers without weights that disable autocast for the device of their positions."""


class CudaRules(TorchFunctionMode):
    """Runs operators on meta tensors with CUDA's dtypes and allocations.

    Autocast applies if `autocast` is a half-precision dtype. `packed` holds the ids of packed weights.
    `count` receives the tensors that are allocated inside of operators.
    """

    def __init__(
        self,
        autocast: torch.dtype | None,
        packed: Mapping[int, Packing] | None = None,
        count: Callable[[Any], None] = lambda result: None,
    ) -> None:
        super().__init__()
        self._autocast = autocast
        self._packed = packed or {}
        self._count = count

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given: dict[str, Any] = dict(kwargs or {})
        name = func.__name__
        if self._autocast is not None and name in _LOWER:
            args, given = (
                _cast(args, self._autocast, self._packed),
                _cast(given, self._autocast, self._packed),
            )
        elif self._autocast is not None and name in _FLOAT32 and given.get("dtype") is None:
            # Without an explicit dtype, which has precedence over autocast.
            args, given = _cast(args, torch.float32, {}), _cast(given, torch.float32, {})

        if name == "tensor":
            given["device"] = "cpu"

        # Tensors on the CPU, such as lengths and masks, keep their values, which decide shapes.
        if not (_any_meta(args) or _any_meta(given.values())):
            return func(*args, **given)
        return self._on_meta(func, name, args, given)

    def _on_meta(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], given: dict[str, Any]
    ) -> Any:
        """Return the result of an operator with a tensor on the meta device."""
        if name == "repeat_interleave" and isinstance(args[1], Tensor) and not args[1].is_meta:
            return _repeated(*args, **given)

        # The values of a mask that is an index decide the shape of the result.
        if name not in ("__getitem__", "__setitem__"):
            args, given = _to_meta(args), _to_meta(given)

        if name == "scaled_dot_product_attention":
            return self._attention(*args, **given)
        if name == "rms_norm":
            return self._rms_norm(*args, **given)
        if name == "topk":
            return _balanced(func(*args, **given), args[0].shape[-1])
        if name == "linear" and (packing := self._packed.get(id(args[1]))):
            return self._packed_linear(packing, *args, **given)
        return func(*args, **given)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Tensor:
        result = cast("Tensor", _FusedAttention.apply(query, key, value, self._count))
        self._count(result)
        return result

    def _rms_norm(
        self, hidden: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        result = cast("Tensor", _FusedRmsNorm.apply(hidden, weight, self._count))
        self._count(result)
        return result

    def _packed_linear(
        self, packing: Packing, hidden: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        dtype = self._autocast or hidden.dtype
        if packing == "dequantized_again":
            result = cast("Tensor", _PackedLinear.apply(hidden, weight, bias, dtype, self._count))
        elif packing == "multiplied":
            result = cast("Tensor", _EightBitProduct.apply(hidden, weight, dtype, self._count))
        else:
            unpacked = torch.empty(weight.shape, dtype=dtype, device=weight.device)
            self._count(unpacked)
            result = torch.nn.functional.linear(hidden, unpacked, bias)
        self._count(result)
        return result


class _FusedAttention(Function):
    """Flash or memory-efficient attention: keeps inputs, output, and one number per query and head."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, count: Callable[[Any], None]
    ) -> Any:
        output = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        count((output, sums))
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.count = count  # pyright: ignore[reportAttributeAccessIssue]
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        inputs = tuple(torch.empty_like(each) for each in (query, key, value))
        ctx.count(inputs)
        return (*inputs, None)


class _FusedRmsNorm(Function):
    """RMS norm in one kernel: it keeps its input and one number per row."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor | None, count: Callable[[Any], None]) -> Any:
        output = torch.empty_like(hidden)
        scales = torch.empty(hidden.shape[:-1], dtype=torch.float32, device=hidden.device)
        count((output, scales))
        ctx.save_for_backward(hidden, scales)
        ctx.count = count  # pyright: ignore[reportAttributeAccessIssue]
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, _ = ctx.saved_tensors
        result = torch.empty_like(hidden)
        ctx.count(result)
        return result, None, None


class _PackedLinear(Function):
    """A linear layer of bitsandbytes: its weight is unpacked in the forward and in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, count: Any
    ) -> Any:
        ctx.unpacked = lambda: torch.empty(weight.shape, dtype=dtype, device=weight.device)
        ctx.count, ctx.shape, ctx.dtype = count, hidden.shape, hidden.dtype
        unpacked = ctx.unpacked()
        count(unpacked)
        output = torch.empty(*hidden.shape[:-1], weight.shape[0], dtype=dtype, device=hidden.device)
        count(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        unpacked = ctx.unpacked()
        result = torch.empty(ctx.shape, dtype=ctx.dtype, device=unpacked.device)
        ctx.count((unpacked, result))
        return result, None, None, None, None


class _EightBitProduct(Function):
    """The 8-bit product of `EightBitLinear`: at each point the format that takes more, int8 or fp8."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype, count: Any) -> Any:
        ctx.unpacked = lambda: torch.empty(weight.shape, dtype=dtype, device=weight.device)
        ctx.count, ctx.shape, ctx.dtype = count, hidden.shape, hidden.dtype
        shape, device = (*hidden.shape[:-1], weight.shape[0]), hidden.device

        # fp8 divides the input by its scale in float32. The kernel of int8 has no such tensor.
        divided = torch.empty(hidden.shape, dtype=torch.float32, device=device)
        rounded = torch.empty(hidden.shape, dtype=torch.int8, device=device)
        count((divided, rounded))
        del divided

        # The product of int8 is 32 bits wide until it is multiplied by the scales.
        product = torch.empty(shape, dtype=torch.int32, device=device)
        count(product)
        del rounded
        output = torch.empty(shape, dtype=dtype, device=device)
        count(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        unpacked = ctx.unpacked()
        result = torch.empty(ctx.shape, dtype=ctx.dtype, device=unpacked.device)
        ctx.count((unpacked, result))
        return result, None, None, None


def compute_positions_on_cpu(network: nn.Module) -> None:
    """Let the layers for positions that call `torch.autocast`, which meta does not have, use the CPU."""

    def enter(_layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (torch.zeros(args[0].shape, dtype=args[0].dtype), *args[1:])

    def leave(_layer: nn.Module, args: Any, output: Any) -> Any:
        return _to_meta(output)

    for layer in network.modules():
        if type(layer).__name__ in _POSITIONS:
            layer.register_forward_pre_hook(enter)
            layer.register_forward_hook(leave)


def _repeated(values: Tensor, repeats: Tensor, dim: int) -> Tensor:
    """Return `repeat_interleave` of a meta tensor by numbers that have values."""
    places = torch.arange(len(repeats)).repeat_interleave(repeats)
    return values.index_select(dim, places.to("meta"))


def _balanced(largest: Any, number: int) -> tuple[Tensor, Tensor]:
    """Return the values of `topk` over the last dimension of size `number`, with indices that have values.

    A mixture of experts selects tokens by these indices. Each expert gets the same number, as in training
    with a balanced router.
    """
    indices = torch.arange(largest.indices.numel()).remainder(number)
    return largest.values, indices.reshape(largest.indices.shape)


def _cast(values: Any, dtype: torch.dtype, packed: Mapping[int, Packing]) -> Any:
    """Return arguments with all floating-point tensors in `dtype`, except packed weights."""

    def convert(tensor: Tensor) -> Tensor:
        keep = not tensor.is_floating_point() or tensor.dtype == dtype or id(tensor) in packed
        return tensor if keep else tensor.to(dtype)

    return recursively_apply(convert, values)


def _any_meta(values: Iterable[Any]) -> bool:
    return any(
        value.device.type == "meta" if isinstance(value, Tensor) else _any_meta(value)
        for value in values
        if isinstance(value, Tensor | list | tuple)
    )


def _to_meta(values: Any) -> Any:
    """Return arguments with tensors of the CPU, such as masks, on the meta device; numbers stay."""

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to("meta") if tensor.device.type == "cpu" and tensor.dim() > 0 else tensor

    return recursively_apply(convert, values)
