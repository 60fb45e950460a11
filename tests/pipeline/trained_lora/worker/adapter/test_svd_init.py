from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.worker.adapter.lora import add_lora, lora_modules, trainable_weights
from pipeline.trained_lora.worker.adapter.svd_init import (
    at_initial_weights,
    init_from_base_weights,
    largest_singular,
)
from tests.pipeline.trained_lora.adapters import delta_weights

SETTINGS = {"rank": 4, "alpha": 2.0}


def initialised(base: Path, init: Any, dtype: str = "float32", **settings: Any) -> tuple[Any, Any]:
    """Return a denoiser with the initialised adapter, and the same without an adapter."""
    family = load_family(base)
    denoiser: Any = family.denoiser.load(dtype, "cpu")
    plain = copy.deepcopy(denoiser)
    lora = LoraSettings(init=init, **{**SETTINGS, **settings})
    add_lora(denoiser, lora, targets=family.lora_targets(), seed=1)
    init_from_base_weights(denoiser, lora, seed=1)
    return denoiser, plain


def weight_of(layer: Any, adapter: str = "default") -> torch.Tensor:
    return layer.scaling[adapter] * (layer.lora_B[adapter].weight @ layer.lora_A[adapter].weight)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_the_initial_adapter_equals_peft_s_and_the_model_still_equals_the_base_model(
    tiny_bases: dict[str, Path], init: Any
) -> None:
    denoiser, plain = initialised(tiny_bases["epsilon"], init)
    modules = dict(lora_modules(denoiser))
    for name, module in modules.items():
        layer = cast("Any", module)
        peft = nn.Sequential(copy.deepcopy(plain.get_submodule(name)))
        config = LoraConfig(r=4, lora_alpha=2, target_modules=["0"], init_lora_weights=init)
        peft_layer: Any = cast("Any", inject_adapter_in_model(config, peft))[0]
        torch.testing.assert_close(weight_of(layer), weight_of(peft_layer), rtol=0, atol=1e-5)
        assert weight_of(layer).abs().max() > 1e-3
        actual = layer.base_layer.weight + weight_of(layer, "at_start")  # the base weight as peft changes it
        torch.testing.assert_close(actual, peft_layer.base_layer.weight, rtol=0, atol=1e-5)
        assert torch.equal(layer.base_layer.weight, plain.get_submodule(name).weight)
    assert max(float(delta.abs().max()) for delta in delta_weights(denoiser).values()) < 1e-6
    assert len(trainable_weights(denoiser)) == 2 * len(modules)
    noisy, text = torch.randn(2, 4, 8, 8), torch.randn(2, 77, 32)
    with torch.no_grad():
        outputs = [unet.eval()(noisy, torch.tensor([5, 700]), text).sample for unet in (denoiser, plain)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-4)


def test_half_precision_base_weights_are_not_rounded(tiny_bases: dict[str, Path]) -> None:
    denoiser, plain = initialised(tiny_bases["epsilon"], "pissa", "bfloat16")
    for name, module in lora_modules(denoiser):
        assert torch.equal(cast("Any", module).base_layer.weight, plain.get_submodule(name).weight)
    assert {weight.dtype for weight in trainable_weights(denoiser)} == {torch.float32}


def test_a_rank_larger_than_a_module_is_an_error(tiny_bases: dict[str, Path]) -> None:
    with pytest.raises(TrainingError, match=r"init: pissa needs a rank of at most 32 for .*, got 33"):
        initialised(tiny_bases["epsilon"], "pissa", rank=33)
    denoiser, _ = initialised(tiny_bases["epsilon"], "pissa", rank=32)
    assert {cast("Any", module).r["default"] for _, module in lora_modules(denoiser)} == {32}


@pytest.mark.parametrize("shape", [(300, 400), (400, 300), (40, 300)], ids=str)
def test_the_largest_singular_values_equal_those_of_a_full_decomposition(shape: tuple[int, int]) -> None:
    random = torch.Generator().manual_seed(2)
    weight = torch.randn(shape, generator=random) / shape[1] ** 0.5
    weight += torch.randn(shape[0], 6, generator=random) @ torch.randn(6, shape[1], generator=random) / 10
    left, values, right = largest_singular(weight, 6, seed=1)
    whole_left, whole_values, whole_right = torch.linalg.svd(weight, full_matrices=False)
    torch.testing.assert_close(values, whole_values[:6], rtol=1e-4, atol=0)
    expected = whole_left[:, :6] * whole_values[:6] @ whole_right[:6]
    torch.testing.assert_close(left * values @ right, expected, rtol=0, atol=1e-3)


def test_a_matrix_that_is_not_much_larger_than_the_rank_is_decomposed_exactly() -> None:
    """Subspace iteration separates neighbouring values slowly, and in a random matrix they are close."""
    weight = torch.randn(300, 300, generator=torch.Generator().manual_seed(2))
    left, values, right = largest_singular(weight, 150, seed=1)
    whole_left, whole_values, whole_right = torch.linalg.svd(weight, full_matrices=False)
    torch.testing.assert_close(values, whole_values[:150], rtol=1e-5, atol=0)
    expected = whole_left[:, :150] * whole_values[:150] @ whole_right[:150]
    torch.testing.assert_close(left * values @ right, expected, rtol=0, atol=1e-3)


def test_the_largest_singular_values_depend_on_the_seed_only_and_leave_the_global_random_state() -> None:
    weight = torch.randn(300, 400, generator=torch.Generator().manual_seed(2))
    with torch.random.fork_rng(devices=[]):
        decompositions: list[tuple[torch.Tensor, ...]] = []
        for global_seed in (3, 4):
            torch.manual_seed(global_seed)
            before = torch.get_rng_state()
            decompositions.append(largest_singular(weight, 6, seed=1))
            assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(*decompositions, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_the_initial_weights_are_active_within_a_context_and_the_trained_ones_after_it(
    tiny_bases: dict[str, Path], init: str
) -> None:
    denoiser, _ = initialised(tiny_bases["epsilon"], init)
    initial = [weight.detach().clone() for weight in trainable_weights(denoiser)]
    with torch.no_grad():
        for weight in trainable_weights(denoiser):
            weight.add_(0.1)
    trained = [weight.detach().clone() for weight in trainable_weights(denoiser)]
    with suppress(RuntimeError), at_initial_weights(denoiser):
        within = [weight.detach().clone() for weight in trainable_weights(denoiser)]
        raise RuntimeError("ends early")
    for start, inside, end, now in zip(initial, within, trained, trainable_weights(denoiser), strict=True):
        assert torch.equal(inside, start)
        assert torch.equal(now, end)


def test_the_part_that_is_subtracted_has_no_dropout(tiny_bases: dict[str, Path]) -> None:
    """Dropout of only one of two parts that cancel each other would change the base model."""
    denoiser, _ = initialised(tiny_bases["epsilon"], "pissa", dropout=0.5)
    for _, module in lora_modules(denoiser):
        dropouts = cast("Any", module).lora_dropout
        assert isinstance(dropouts["at_start"], nn.Identity)
        assert dropouts["default"].p == 0.5
