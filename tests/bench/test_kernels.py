from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from bench.kernels import Kernels, Step, counted
from demo.tiny_models import make_tiny_flux
from pipeline.models.worker.family import load_family


def test_each_operator_that_moves_data_is_a_kernel_and_views_are_none() -> None:
    with torch.device("meta"):
        weight, rows = torch.empty(8, 4), torch.empty(2, 4)
    with Kernels() as kernels:
        product = (rows @ weight.t()).view(4, 4)  # the product is a kernel, its bytes do not count
        assert (kernels.number, kernels.moved_bytes) == (1, 0)
        half = product.to(torch.bfloat16)
        assert (kernels.number, kernels.moved_bytes, kernels.cast_bytes) == (2, 16 * (4 + 2), 16 * (4 + 2))
        half.mul_(2)
        assert (kernels.number, kernels.moved_bytes) == (3, 16 * (4 + 2) + 16 * (2 + 2))
        torch.empty_like(half)
    assert (kernels.number, kernels.cast_bytes) == (3, 16 * (4 + 2))


def test_the_backward_pass_is_counted_too() -> None:
    layer = nn.LayerNorm(4, device="meta")
    hidden = torch.empty(2, 4, device="meta", requires_grad=True)
    with Kernels() as kernels:
        output = layer(hidden).sum()
        forward = kernels.number
        output.backward()
    assert kernels.number > forward == 2


def test_checkpointing_counts_the_blocks_once_more(tmp_path: Path) -> None:
    make_tiny_flux(tmp_path / "flux")
    family = load_family(tmp_path / "flux")
    plain, checkpointed = (counted(family, Step("FLUX.1 dev", 1, each)) for each in (False, True))
    assert 1.2 * plain.number < checkpointed.number < 2 * plain.number
    assert checkpointed.cast_bytes > plain.cast_bytes > 0
