"""Paths of a published UNet's layers in the original code, as in checkpoints of Stable Diffusion 1.5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import FamilyError
from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.parts.lora_keys import Layer
from pipeline.models.families.parts.unet_keys import UNetKeys

UP_BLOCKS = ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"]

PATHS = {
    "down_blocks.0.resnets.0.conv1": "input_blocks.1.0.in_layers.2",
    "down_blocks.0.attentions.0.proj_in": "input_blocks.1.1.proj_in",
    "down_blocks.0.attentions.1.proj_out": "input_blocks.2.1.proj_out",
    "down_blocks.0.downsamplers.0.conv": "input_blocks.3.0.op",
    "down_blocks.1.resnets.0.conv_shortcut": "input_blocks.4.0.skip_connection",
    "down_blocks.1.resnets.1.time_emb_proj": "input_blocks.5.0.emb_layers.1",
    "down_blocks.1.downsamplers.0.conv": "input_blocks.6.0.op",
    "down_blocks.2.attentions.1.transformer_blocks.0.attn1.to_q": (
        "input_blocks.8.1.transformer_blocks.0.attn1.to_q"
    ),
    "down_blocks.2.downsamplers.0.conv": "input_blocks.9.0.op",
    "down_blocks.3.resnets.1.conv2": "input_blocks.11.0.out_layers.3",
    "mid_block.resnets.0.conv1": "middle_block.0.in_layers.2",
    "mid_block.attentions.0.proj_in": "middle_block.1.proj_in",
    "mid_block.resnets.1.conv2": "middle_block.2.out_layers.3",
    "up_blocks.0.resnets.0.conv1": "output_blocks.0.0.in_layers.2",
    "up_blocks.0.resnets.2.conv1": "output_blocks.2.0.in_layers.2",
    "up_blocks.0.upsamplers.0.conv": "output_blocks.2.1.conv",
    "up_blocks.1.resnets.0.conv1": "output_blocks.3.0.in_layers.2",
    "up_blocks.1.attentions.2.proj_in": "output_blocks.5.1.proj_in",
    "up_blocks.1.upsamplers.0.conv": "output_blocks.5.2.conv",
    "up_blocks.2.upsamplers.0.conv": "output_blocks.8.2.conv",
    "up_blocks.3.attentions.0.proj_in": "output_blocks.9.1.proj_in",
    "up_blocks.3.resnets.2.conv_shortcut": "output_blocks.11.0.skip_connection",
}
"""Paths in the original code by paths in diffusers."""


def model_with(folder: Path, **config: Any) -> ModelFolder:
    """Return a model with this configuration of its UNet."""
    (folder / "unet").mkdir()
    index = {"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "unet" / "config.json").write_text(json.dumps({"up_block_types": UP_BLOCKS, **config}))
    return ModelFolder(folder)


@pytest.mark.parametrize("config", [{"layers_per_block": 2}, {}], ids=["two layers", "two by default"])
def test_modules_have_the_paths_of_published_checkpoints(tmp_path: Path, config: dict[str, int]) -> None:
    model, keys = model_with(tmp_path, **config), UNetKeys(kohya_original=True)
    assert {module: keys.comfyui_key(model, module) for module in PATHS} == {
        module: f"diffusion_model.{path}" for module, path in PATHS.items()
    }
    assert {module: keys.kohya_layer(model, module) for module in PATHS} == {
        module: Layer("lora_unet_" + path.replace(".", "_"), (module,)) for module, path in PATHS.items()
    }


def test_another_number_of_layers_moves_all_later_blocks(tmp_path: Path) -> None:
    model, keys = model_with(tmp_path, layers_per_block=3), UNetKeys()
    for module, path in (
        ("down_blocks.1.attentions.2.proj_in", "input_blocks.7.1.proj_in"),
        ("down_blocks.1.downsamplers.0.conv", "input_blocks.8.0.op"),
        ("up_blocks.1.attentions.3.proj_in", "output_blocks.7.1.proj_in"),
        ("up_blocks.1.upsamplers.0.conv", "output_blocks.7.2.conv"),
    ):
        assert keys.comfyui_key(model, module) == f"diffusion_model.{path}"


def test_by_default_kohyas_keys_are_the_paths_of_diffusers_and_attentions_are_adapted(tmp_path: Path) -> None:
    model, keys = model_with(tmp_path), UNetKeys()
    module = "down_blocks.0.attentions.0.proj_in"
    expected = Layer("lora_unet_down_blocks_0_attentions_0_proj_in", (module,))
    assert keys.kohya_layer(model, module) == expected
    assert keys.targets(model) == ["to_q", "to_k", "to_v", "to_out.0"]
    assert keys.reads_kohya(model)


@pytest.mark.parametrize(
    ("module", "config"),
    [
        ("conv_in", {}),
        ("mid_block.resnets.0.norm1", {}),
        ("down_blocks.0.resnets.0.norm1", {}),
        ("time_embedding.linear_1", {}),
        ("down_blocks.0.attentions.0.proj_in", {"layers_per_block": [2, 2, 1, 1]}),
    ],
)
def test_a_module_without_a_path_in_the_original_code_is_an_error(
    tmp_path: Path, module: str, config: dict[str, Any]
) -> None:
    with pytest.raises(FamilyError, match=f"does not include the module {module}"):
        UNetKeys().comfyui_key(model_with(tmp_path, **config), module)
