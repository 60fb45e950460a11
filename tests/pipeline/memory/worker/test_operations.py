from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from pipeline.memory.worker.operations import Operations
from pipeline.trained_lora.worker.memory.cuda_rules import CudaRules


def test_each_operator_that_moves_data_is_a_kernel_and_views_are_none() -> None:
    with torch.device("meta"):
        weight, rows = torch.empty(8, 4), torch.empty(2, 4)
    with Operations() as operations:
        product = (rows @ weight.t()).view(4, 4)  # the product is a kernel, its bytes do not count
        work = operations.work()
        assert (work.kernels, work.product_flops, work.moved_bytes) == (1, 2 * 2 * 4 * 8, 0)
        half = product.to(torch.bfloat16)
        work = operations.work()
        assert (work.kernels, work.moved_bytes, work.cast_bytes) == (2, 16 * (4 + 2), 16 * (4 + 2))
        half.mul_(2)
        work = operations.work()
        assert (work.kernels, work.moved_bytes) == (3, 16 * (4 + 2) + 16 * (2 + 2))
        torch.empty_like(half)
    assert (operations.work().kernels, operations.work().cast_bytes) == (3, 16 * (4 + 2))


def test_the_backward_pass_is_counted_too() -> None:
    layer = nn.LayerNorm(4, device="meta")
    hidden = torch.empty(2, 4, device="meta", requires_grad=True)
    with Operations() as operations:
        output = layer(hidden).sum()
        forward = operations.work().kernels
        output.backward()
    assert operations.work().kernels > forward == 2


def test_attention_is_counted_by_its_operations() -> None:
    batch, heads, queries, keys, width = 2, 3, 5, 7, 4
    with torch.device("meta"):
        query = torch.empty(batch, heads, queries, width)
        key, value = torch.empty(2, batch, heads, keys, width)
    operations = Operations()
    with operations, CudaRules(torch.bfloat16), operations.attention:
        functional.scaled_dot_product_attention(query, key=key, value=value)
    forward = 2 * (2 * batch * heads * queries * keys * width)
    assert operations.work().attention_flops == forward
    assert operations.work(has_backward=True).attention_flops == 3.5 * forward
