from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from demo.tiny_models import make_tiny_flux, make_tiny_sdxl
from pipeline.errors import TrainingError
from pipeline.images.geometry import Size
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.worker.adapter.lora import (
    adapted_networks,
    adapter_state,
    add_lora,
    collect,
    load_adapter_state,
    load_networks_state,
    lora_modules,
    scaled_adapters,
    trainable_weights,
)
from pipeline.trained_lora.worker.adapter.svd_init import init_from_base_weights
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
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_k.lora_A.weight"
    never_change = torch.tensor([0.09029576, -0.09306462, -0.11116117])
    torch.testing.assert_close(one[name].flatten()[:3], never_change, rtol=0, atol=1e-6)


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


def moved(base: Path, **settings: Any) -> Any:
    """Return a denoiser whose adapter of these settings is not zero."""
    family = load_family(base)
    denoiser = cast("Any", family.denoiser.load("float32", "cpu"))
    lora = LoraSettings.model_validate({"rank": 4, "alpha": 2.0, **settings})
    add_lora(denoiser, lora, targets=family.lora_targets(), seed=1)
    if lora.starts_from_base_weights:
        init_from_base_weights(denoiser, lora, seed=1)
    with torch.no_grad():
        for weight in trainable_weights(denoiser):
            weight.add_(0.05)
    return denoiser.eval()


@torch.no_grad()
def output(denoiser: Any) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    width = denoiser.config.cross_attention_dim
    latent, text = torch.randn(1, 4, 8, 8, generator=draw), torch.randn(1, 5, width, generator=draw)
    return denoiser(latent, torch.tensor([500]), text).sample


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dora": True},
        {"init": "pissa"},
        {"kind": "loha"},
        {"kind": "lokr"},
        {"rslora": True},
        {"kind": "oft", "rank": 16, "alpha": 16.0},
    ],
    ids=["lora", "dora", "pissa", "loha", "lokr", "rslora", "oft"],
)
def test_a_scale_of_0_is_the_base_model_1_is_the_adapter_and_both_end_with_the_context(
    tiny_bases: dict[str, Path], settings: dict[str, Any]
) -> None:
    plain = output(load_family(tiny_bases["epsilon"]).denoiser.load("float32", "cpu"))
    denoiser = moved(tiny_bases["epsilon"], **settings)
    adapted_output = output(denoiser)
    trained = {name for name, weight in denoiser.named_parameters() if weight.requires_grad}
    outputs: dict[float, torch.Tensor] = {}
    for scale in (0.0, 0.5, 1.0):
        with suppress(RuntimeError), scaled_adapters({"": denoiser}, scale):
            outputs[scale] = output(denoiser)
            raise RuntimeError("ends early")
        assert torch.equal(output(denoiser), adapted_output)
        assert {name for name, weight in denoiser.named_parameters() if weight.requires_grad} == trained
    change = float((adapted_output - plain).abs().max())
    assert change > 0.001
    # Initial weights that are subtracted again leave rounding errors.
    torch.testing.assert_close(outputs[0.0], plain, rtol=0, atol=1e-3 * change)
    torch.testing.assert_close(outputs[1.0], adapted_output)
    assert 1e-2 * change < float((outputs[0.5] - plain).abs().max()) < change


CONFIGURED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"r": 4, "lora_alpha": 2.0, "lora_dropout": 0.0, "use_dora": False, "use_rslora": False}),
    ({"dropout": 0.25, "rslora": True}, {"lora_dropout": 0.25, "use_rslora": True, "use_dora": False}),
    ({"dora": True}, {"use_dora": True, "use_rslora": False, "init_lora_weights": True}),
    ({"init": "gaussian"}, {"init_lora_weights": "gaussian"}),
    ({"kind": "loha"}, {"r": 4, "alpha": 2.0}),
    ({"kind": "lokr", "lokr_factor": 3}, {"r": 4, "alpha": 2.0, "decompose_factor": 3}),
]


@pytest.mark.parametrize(("settings", "expected"), CONFIGURED, ids=str)
def test_peft_gets_the_settings_of_the_recipe_and_other_ranks_for_some_modules(
    tiny_bases: dict[str, Path], settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    family = load_family(tiny_bases["epsilon"])
    ranks = ({"modules": "mid_block.*", "rank": 2, "alpha": 3.0},)
    lora = LoraSettings.model_validate({"rank": 4, "alpha": 2.0, "ranks": ranks, **settings})
    denoiser = cast("Any", family.denoiser.load("float32", "cpu"))
    config = add_lora(denoiser, lora, targets=family.lora_targets(), seed=1)
    assert {name: getattr(config, name) for name in expected} == expected
    sizes = {name: module.r["default"] for name, module in lora_modules(denoiser)}
    assert set(sizes.values()) == {2, 4}
    assert {name for name, rank in sizes.items() if rank == 2} == {
        name for name in sizes if name.startswith("mid_block.")
    }
    scales = {sizes[name]: module.scaling["default"] for name, module in lora_modules(denoiser)}
    assert scales == ({4: 1.0, 2: 3 / 2**0.5} if lora.rslora else {4: 0.5, 2: 1.5})


def test_a_scale_of_half_halves_the_scale_of_rslora(tiny_bases: dict[str, Path]) -> None:
    """The scale is alpha / sqrt(rank)."""
    ranks = ({"modules": "*.to_k", "rank": 9, "alpha": 2.0},)
    denoiser = moved(tiny_bases["epsilon"], rslora=True, ranks=ranks)
    layers = [layer for _, layer in lora_modules(denoiser)]
    with scaled_adapters({"": denoiser}, 0.5):
        scales = {layer.r["default"]: layer.scaling["default"] for layer in layers}
    assert scales == {4: 0.5 * 2 / 2, 9: 0.5 * 2 / 3}


def test_the_states_of_several_networks_have_their_prefixes_and_load_back(
    tiny_bases: dict[str, Path],
) -> None:
    """Two denoisers stand in for a denoiser and a text encoder."""
    networks = adapted_networks(moved(tiny_bases["epsilon"]), {"text_encoder": moved(tiny_bases["epsilon"])})
    assert list(networks) == ["", "text_encoder."]
    state = {name: torch.randn_like(weight) for name, weight in collect(networks, adapter_state).items()}
    own = adapter_state(networks[""])
    assert set(state) == {*own, *(f"text_encoder.{name}" for name in own)}
    load_networks_state(networks, state)
    assert differing_tensors(collect(networks, adapter_state), state) == []


def test_the_state_of_a_frozen_adapter_loads_back(tiny_bases: dict[str, Path]) -> None:
    denoiser = moved(tiny_bases["epsilon"], init="pissa")
    state = {name: torch.randn_like(weight) for name, weight in adapter_state(denoiser).items()}
    frozen = [name for name in state if name.startswith("at_start:")]
    assert len(frozen) * 2 == len(state)
    load_adapter_state(denoiser, state)
    assert differing_tensors(adapter_state(denoiser), state) == []


def test_states_that_do_not_match_are_counted_and_the_first_is_named(tiny_bases: dict[str, Path]) -> None:
    denoiser = adapted(tiny_bases["epsilon"])
    state = adapter_state(denoiser)
    first = min(state)
    for changed in (
        {**state, "unknown": torch.zeros(1), first: state[first]},
        {**state, first: state[first][:1]},
        {name: weight for name, weight in state.items() if name != first},
    ):
        name = "unknown" if "unknown" in changed else first
        with pytest.raises(
            TrainingError, match=f"1 saved weight does not match the adapter, the first is {name}"
        ):
            load_adapter_state(denoiser, changed)


class Casts(TorchDispatchMode):
    """Counts copies between dtypes, in forward and backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [make_tiny_sdxl, make_tiny_flux])
def test_layers_under_autocast_do_not_cast_their_inputs_and_compute_the_same(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "base")
    family = load_family(tmp_path / "base")
    adapted_denoiser = adapted(tmp_path / "base", dtype="bfloat16")
    random = torch.Generator().manual_seed(0)
    for weight in trainable_weights(adapted_denoiser):
        weight.data = torch.randn(weight.shape, generator=random) / 8
    conditions: dict[str, Any] = {
        name: torch.randn(1, *shape, generator=random) for name, shape in family.text_shapes().items()
    }
    for name in ("original_size_hw", "crop_top_left", "target_size_hw"):
        conditions[name] = torch.full((1, 2), 64)
    noisy = torch.randn(1, *family.latent_shape(Size(64, 64)), generator=random)

    casts: list[int] = []
    tensors: list[list[torch.Tensor]] = []
    as_in_peft = copy.deepcopy(adapted_denoiser)
    for _, module in lora_modules(as_in_peft):
        module.cast_input_dtype_enabled = True
    for denoiser in (as_in_peft, adapted_denoiser):
        with Casts() as counted, torch.autocast("cpu", torch.bfloat16):
            prediction = family.denoiser.predict(denoiser, noisy, torch.tensor([500.0]), conditions)
            prediction.square().mean().backward()
        casts.append(counted.count)
        gradients = [cast("torch.Tensor", weight.grad) for weight in trainable_weights(denoiser)]
        tensors.append([prediction.detach(), *gradients])

    assert differing_tensors(*tensors) == []
    assert casts[0] - casts[1] >= 2 * 20, "one cast forward and one backward per layer"
