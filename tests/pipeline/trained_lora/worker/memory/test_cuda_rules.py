from __future__ import annotations

from math import prod
from typing import Any

import torch

from pipeline.trained_lora.worker.memory.cuda_rules import CudaRules

ROWS, IN, OUT = 40, 64, 48


def test_an_eight_bit_product_counts_its_temporary_tensors_and_keeps_none_for_the_backward_pass() -> None:
    """The order and the dtypes are those of `EightBitLinear`."""
    counted: list[tuple[torch.dtype, int]] = []

    def count(created: Any) -> None:
        tensors = created if isinstance(created, tuple) else (created,)
        counted.extend((each.dtype, prod(each.shape)) for each in tensors)

    weight = torch.empty(OUT, IN, dtype=torch.bfloat16, device="meta")
    hidden = torch.empty(2, ROWS // 2, IN, device="meta", requires_grad=True)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with CudaRules(torch.bfloat16, {id(weight): "multiplied"}, count), saved:
        output = torch.nn.functional.linear(hidden, weight)
    assert counted == [
        (torch.float32, ROWS * IN),
        (torch.int8, ROWS * IN),
        (torch.int32, ROWS * OUT),
        (torch.bfloat16, ROWS * OUT),
        (torch.bfloat16, ROWS * OUT),  # the output once more, as the layer's result
    ]
    assert kept == []

    counted.clear()
    output.backward(torch.empty_like(output))
    assert counted == [(torch.bfloat16, OUT * IN), (torch.bfloat16, ROWS * IN)]
    assert hidden.grad is not None
    assert (hidden.grad.shape, hidden.grad.dtype) == (hidden.shape, torch.float32)
