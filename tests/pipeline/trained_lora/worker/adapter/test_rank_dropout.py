"""Rank and module dropout equal sd-scripts' definition, act in training only, and resume bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from pipeline.recipe import LoraSettings
from pipeline.trained_lora.worker.adapter.lora import lora_modules
from tests.pipeline.trained_lora.worker.adapter.random_adapters import (
    CONVOLUTION,
    LINEAR,
    check_runs,
    random_adapters,
)

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def layer_of(base: Path, name: str, **settings: Any) -> Any:
    """Return an adapted layer with random weights in its adapter."""
    lora = LoraSettings(rank=4, alpha=2.0, conv_rank=4, **settings)
    return dict(lora_modules(random_adapters(base, lora)))[name]


def parts(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs of 3 samples, the base layer's outputs, and each rank's share of the adapter's output."""
    base, down, up = layer.get_base_layer(), layer.lora_A["default"], layer.lora_B["default"]
    is_convolution = isinstance(base, torch.nn.Conv2d)
    shape = (3, base.in_channels, 5, 6) if is_convolution else (3, 7, base.in_features)
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    hidden = (
        torch.nn.functional.conv2d(inputs, down.weight, None, base.stride, base.padding)
        if is_convolution
        else torch.nn.functional.linear(inputs, down.weight)
    )
    weight = up.weight.flatten(1)
    product = "brhw,or->robhw" if is_convolution else "btr,or->robt"
    shares = torch.einsum(product, hidden, weight).movedim(2, 1)
    return inputs, base(inputs), shares.movedim(2, -3 if is_convolution else -1)


@pytest.mark.parametrize("name", [LINEAR, CONVOLUTION])
@torch.no_grad()
def test_each_sample_loses_its_own_ranks_and_the_others_are_larger(
    tiny_bases: dict[str, Path], name: str
) -> None:
    layer = layer_of(tiny_bases["epsilon"], name, rank_dropout=0.5)
    inputs, base, shares = parts(layer)

    # The scale is alpha / rank, and the remaining ranks are divided by 1 - 0.5.
    kept = set[tuple[bool, ...]]()
    for seed in range(8):
        torch.manual_seed(seed)
        output = layer(inputs)
        for sample in range(len(inputs)):
            change = output[sample] - base[sample]
            columns = torch.stack([rank[sample].flatten() for rank in 0.5 * shares / 0.5], dim=1)
            factors = torch.linalg.lstsq(columns, change.flatten()[:, None]).solution[:, 0]
            is_kept = factors > 0.5
            torch.testing.assert_close(factors, is_kept.float(), rtol=0, atol=1e-3)
            kept.add(tuple(is_kept.tolist()))
    assert len(kept) > 6, "samples and steps draw different ranks"


@torch.no_grad()
def test_a_module_is_dropped_for_all_samples_of_a_batch_or_for_none(tiny_bases: dict[str, Path]) -> None:
    layer = layer_of(tiny_bases["epsilon"], LINEAR, module_dropout=0.25)
    inputs, base, shares = parts(layer)
    complete = base + 0.5 * shares.sum(0)
    number = 0
    for seed in range(400):
        torch.manual_seed(seed)
        output = layer(inputs)
        is_dropped = torch.allclose(output, base, atol=1e-4)
        number += is_dropped
        torch.testing.assert_close(output, base if is_dropped else complete, rtol=0, atol=1e-4)

    # 100 are expected with a standard deviation of 8.7; 6 of them fail once in 5e8.
    assert 48 < number < 152


@torch.no_grad()
def test_nothing_is_dropped_outside_of_training(tiny_bases: dict[str, Path]) -> None:
    layer = layer_of(tiny_bases["epsilon"], LINEAR, rank_dropout=0.5, module_dropout=0.5).eval()
    inputs, base, shares = parts(layer)
    before = torch.random.get_rng_state()
    torch.testing.assert_close(layer(inputs), base + 0.5 * shares.sum(0), rtol=0, atol=1e-4)
    assert torch.equal(torch.random.get_rng_state(), before)


DROPOUTS = {"rank": 4, "alpha": 2.0, "rank_dropout": 0.3, "module_dropout": 0.2}


def test_a_run_that_is_stopped_resumes_bit_for_bit_and_recomputed_activations_drop_the_same(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(steps=3, lora=DROPOUTS, sample_every=0)
    check_runs(project)
