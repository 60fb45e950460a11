"""Names of a UNet's layers in the original code of Stable Diffusion 1, 2 and XL."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.errors import FamilyError
from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.parts.lora_keys import Layer, LoraKeys, underscored

_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(attentions|resnets)\.(\d+)\.(.+)")
_MID_BLOCK = re.compile(r"mid_block\.(attentions|resnets)\.(\d+)\.(.+)")
_SAMPLER = re.compile(r"(down|up)_blocks\.(\d+)\.(?:down|up)samplers\.0\.conv")

# Names of a residual block's members in CompVis's code, by their diffusers names.
_RESIDUAL = {
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


@dataclass(frozen=True)
class UNetKeys(LoraKeys):
    """Layers of a UNet; ComfyUI's generic keys are `diffusion_model.` and the path in CompVis's code.

    Attributes:
        kohya_original: Whether kohya's keys use the path in CompVis's code instead of diffusers'.
    """

    target_modules: Sequence[str] | Callable[[ModelFolder], Sequence[str]] = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
    )
    kohya_readable: bool | Callable[[ModelFolder], bool] = True
    kohya_original: bool = False

    def kohya_layer(self, model: ModelFolder, module: str) -> Layer:
        path = _original_path(model, module) if self.kohya_original else module
        return Layer(underscored(path), (module,))

    def comfyui_key(self, model: ModelFolder, module: str) -> str:
        return f"diffusion_model.{_original_path(model, module)}"


def _original_path(model: ModelFolder, module: str) -> str:
    layers = model.config("unet").get("layers_per_block", 2)
    path = _path_in_blocks(model, module, layers) if isinstance(layers, int) else None
    if path is None:
        raise FamilyError(
            f"the original code's layout does not include the module {module}",
            where=str(model.config_file("unet")),
            fix="adapt only modules inside blocks, on a UNet with one layers_per_block for all levels",
        )
    return path


def _path_in_blocks(model: ModelFolder, module: str, layers: int) -> str | None:
    # CompVis's UNet numbers its blocks through all levels. A level on the way down has its residual blocks
    # and one more block that halves the edges. A level on the way up has one residual block more. Member 0 of
    # a block is residual, member 1 is the attention, and the last member of a level's last block on the way
    # up doubles the edges.
    if (match := _MID_BLOCK.fullmatch(module)) and (inner := _inner(match[1], match[3])):
        member = 1 if match[1] == "attentions" else 2 * int(match[2])
        return f"middle_block.{member}.{inner}"

    if (match := _BLOCK.fullmatch(module)) and (inner := _inner(match[3], match[5])):
        index = int(match[2]) * (layers + 1) + int(match[4])
        block = f"input_blocks.{index + 1}" if match[1] == "down" else f"output_blocks.{index}"
        return f"{block}.{int(match[3] == 'attentions')}.{inner}"

    if match := _SAMPLER.fullmatch(module):
        index = (int(match[2]) + 1) * (layers + 1)
        if match[1] == "down":
            return f"input_blocks.{index}.0.op"
        has_attention = "CrossAttn" in model.config("unet")["up_block_types"][int(match[2])]
        return f"output_blocks.{index - 1}.{2 if has_attention else 1}.conv"
    return None


def _inner(kind: str, path: str) -> str | None:
    return path if kind == "attentions" else _RESIDUAL.get(path)
