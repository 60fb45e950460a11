from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.worker.adapter.lora import (
    adapter_state,
    add_lora,
    load_adapter_state,
    lora_modules,
    trainable_weights,
)
from tests.pipeline.trained_lora.adapters import delta_weights
from tests.tensor_differences import differing_tensors


def adapted(base: Path, *, seed: int = 1, targets: list[str] | None = None, dtype: str = "float32") -> Any:
    family = load_family(base)
    denoiser = cast("Any", family.denoiser.load(dtype, "cpu"))
    add_lora(denoiser, LoraSettings(rank=4, alpha=2.0), targets=targets or family.lora_targets(), seed=seed)
    return denoiser


def test_a_fresh_adapter_is_zero_float32_and_the_only_trainable_part(tiny_bases: dict[str, Path]) -> None:
    denoiser = adapted(tiny_bases["epsilon"], dtype="bfloat16")
    weights = trainable_weights(denoiser)
    modules = dict(lora_modules(denoiser))
    assert len(weights) == 2 * len(modules) == 64
    assert {weight.dtype for weight in weights} == {torch.float32}
    assert [name for name, delta in delta_weights(denoiser).items() if delta.any()] == []
    assert [name for name in modules if "attn" not in name] == []


def test_the_initial_weights_depend_only_on_the_seed(tiny_bases: dict[str, Path]) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, same, other = (adapter_state(adapted(tiny_bases["epsilon"], seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert differing_tensors(one, same) == []
    assert differing_tensors(one, other), "another seed must give other weights"


def test_a_saved_state_loads_back(tiny_bases: dict[str, Path]) -> None:
    denoiser = adapted(tiny_bases["epsilon"])
    state = {name: torch.randn_like(weight) for name, weight in adapter_state(denoiser).items()}
    load_adapter_state(denoiser, state)
    assert differing_tensors(adapter_state(denoiser), state) == []
    name = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    expected = 0.5 * state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]
    torch.testing.assert_close(delta_weights(denoiser)[name], expected)


def test_a_state_of_another_adapter_is_an_error(tiny_bases: dict[str, Path]) -> None:
    denoiser = adapted(tiny_bases["epsilon"])
    state = adapter_state(denoiser)
    del state[min(state)]
    with pytest.raises(TrainingError, match="1 saved weight does not match the adapter"):
        load_adapter_state(denoiser, state)


def test_targets_without_a_match_are_named_in_the_error(tiny_bases: dict[str, Path]) -> None:
    with pytest.raises(TrainingError) as excinfo:
        adapted(tiny_bases["epsilon"], targets=["no_such_module"])
    assert "no_such_module" in excinfo.value.what
