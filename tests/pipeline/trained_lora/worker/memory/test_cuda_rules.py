from __future__ import annotations

from math import prod
from typing import Any

import torch
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU
from torch.utils.flop_counter import FlopCounterMode

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


def test_each_expert_computes_an_equal_share_of_the_tokens() -> None:
    """HiDream's layer: two of four experts for each token, and one that all tokens share."""
    batch, tokens, width = 2, 24, 32

    def products(device: str) -> tuple[torch.Tensor, int]:
        with torch.device(device):
            layer = MOEFeedForwardSwiGLU(width, 64, num_routed_experts=4, num_activated_experts=2).train()
            hidden = torch.zeros(batch, tokens, width)
        counter = FlopCounterMode(display=False)
        with CudaRules(torch.bfloat16 if device == "meta" else None), counter:
            output = layer(hidden)
        output.sum().backward()
        return output, counter.get_total_flops()

    (forecast, forecast_flops), (real, real_flops) = products("meta"), products("cpu")
    assert forecast.shape == real.shape
    assert forecast_flops == real_flops > 0


def test_numbers_that_decide_shapes_keep_their_values() -> None:
    hidden = torch.empty(1, 3, 8, device="meta")
    with CudaRules(torch.bfloat16):
        mask = torch.tensor([True, False, True], device=hidden.device)
        assert hidden[:, mask].shape == (1, 2, 8)
        repeated = hidden.repeat_interleave(torch.where(mask, 4, 1), dim=1)
    assert repeated.shape == (1, 9, 8)
