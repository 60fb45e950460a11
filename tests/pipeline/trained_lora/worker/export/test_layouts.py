"""kohya's and ComfyUI's layouts of fused layers, convolutions and DoRA, and files that do not match them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import TrainingError
from pipeline.trained_lora.export.lora_files import Layout, LoraModule
from pipeline.trained_lora.worker.export.layouts import file_weights, layout_tensors, trained_weights

QUERY, KEY = (
    LoraModule(
        name=f"attn.to_{name}",
        diffusers=f"unet.attn.to_{name}",
        kohya="lora_unet_attn_qk",
        comfyui=f"diffusion_model.attn.{name}",
        in_features=4,
        out_features=out_features,
        rank=2,
        alpha=3.0,
        kohya_part=part,
        kohya_outs=(3, 5),
    )
    for part, (name, out_features) in enumerate((("q", 3), ("k", 5)))
)
CONVOLUTION = LoraModule(
    name="conv",
    diffusers="unet.conv",
    kohya="lora_unet_conv",
    comfyui="diffusion_model.conv",
    in_features=4,
    out_features=6,
    rank=2,
    alpha=1.0,
    kernel=(3, 3),
)
MODULES = [QUERY, KEY, CONVOLUTION]

Norms = dict[str, tuple[torch.Tensor, torch.Tensor]]


def adapter(modules: list[LoraModule]) -> tuple[dict[str, torch.Tensor], Norms]:
    """Return random weights of the modules' adapters, and random row norms."""
    draw = torch.Generator().manual_seed(1)
    state: dict[str, torch.Tensor] = {}
    for module in modules:
        shapes = module.shapes("diffusers")
        for key, name in zip(module.keys("diffusers")[:2], ("lora_A.weight", "lora_B.weight"), strict=True):
            state[f"{module.name}.{name}"] = torch.randn(shapes[key], generator=draw)
        if module.magnitude:
            shape = shapes[module.magnitude_key("diffusers")]
            state[f"{module.name}.lora_magnitude_vector"] = torch.rand(shape, generator=draw) + 0.5
    norms = {
        module.name: (
            torch.rand(module.out_features, generator=draw) + 0.5,
            torch.rand(module.out_features, generator=draw) + 0.5,
        )
        for module in modules
        if module.magnitude
    }
    return state, norms


def written(path: Path, modules: list[LoraModule], layout: Layout) -> tuple[dict[str, torch.Tensor], Norms]:
    state, norms = adapter(modules)
    save_file(layout_tensors(layout, modules, state, norms), path)
    return state, norms


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("layout", ["kohya", "comfyui"])
def test_the_weights_in_a_file_are_the_trained_ones(tmp_path: Path, layout: Any, dora: bool) -> None:
    modules = [replace(module, magnitude=dora) for module in MODULES]
    state, norms = written(tmp_path / "lora", modules, layout)
    expected, actual = (
        trained_weights(modules, state, norms),
        file_weights(tmp_path / "lora", modules, layout, norms),
    )
    assert list(actual) == list(expected) == ["attn.to_q", "attn.to_k", "conv"]
    for module in modules:
        of_file, trained = actual[module.name], expected[module.name]
        if layout == "kohya" and module.kohya_outs:
            assert torch.equal(of_file.down, trained.down)
            assert torch.equal(of_file.up, trained.up)
            assert of_file.scale == trained.scale == module.alpha / module.rank
        elif layout == "comfyui":
            assert of_file.scale == 1.0
        delta = state[f"{module.name}.lora_B.weight"].flatten(1) @ state[
            f"{module.name}.lora_A.weight"
        ].flatten(1)
        torch.testing.assert_close(of_file.delta(), module.alpha / module.rank * delta)
        assert (of_file.row_factors is not None) == dora
        if dora:
            magnitude = state[f"{module.name}.lora_magnitude_vector"].flatten()
            torch.testing.assert_close(of_file.row_factors, magnitude / norms[module.name][1])
            torch.testing.assert_close(trained.row_factors, magnitude / norms[module.name][1])


def test_a_fused_layer_holds_its_parts_in_blocks_and_their_number_in_alpha(tmp_path: Path) -> None:
    written(tmp_path / "lora", MODULES, "kohya")
    tensors = load_file(tmp_path / "lora")
    up = tensors["lora_unet_attn_qk.lora_up.weight"]
    assert up.shape == (8, 4)
    assert not up[:3, 2:].any()
    assert not up[3:, :2].any()
    assert float(tensors["lora_unet_attn_qk.alpha"]) == 6.0, "alpha 3 of two parts, each a half of the ranks"
    assert float(tensors["lora_unet_conv.alpha"]) == 1.0


def _another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lora_unet_conv.lora_up.weight"] = torch.zeros(6, 2)


DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (
        lambda tensors: tensors.pop("lora_unet_conv.alpha"),
        "1 key is missing.*lora_unet_conv.alpha",
    ),
    "unexpected": (
        lambda tensors: tensors.update(x=torch.ones(1)),
        "1 key is missing, unexpected.*first is x",
    ),
    "another shape": (_another_shape, "1 key is missing.*first is lora_unet_conv.lora_up.weight"),
    "another block": (
        lambda tensors: tensors["lora_unet_attn_qk.lora_up.weight"][7, 0].fill_(1.0),
        "lora_unet_attn_qk.lora_up.weight has numbers other than zero outside",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_does_not_match_its_modules_is_an_error(tmp_path: Path, damage: str) -> None:
    written(tmp_path / "lora", MODULES, "kohya")
    tensors = load_file(tmp_path / "lora")
    change, message = DAMAGES[damage]
    change(tensors)
    save_file(tensors, tmp_path / "lora")
    with pytest.raises(TrainingError, match=message) as excinfo:
        file_weights(tmp_path / "lora", MODULES, "kohya", {})
    assert excinfo.value.where == str(tmp_path / "lora")


@pytest.mark.parametrize("content", [None, b"", b"no such file"], ids=str)
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "lora").write_bytes(content)
    with pytest.raises(TrainingError, match="the file cannot be read"):
        file_weights(tmp_path / "lora", MODULES, "kohya", {})
