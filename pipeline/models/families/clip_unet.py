"""CLIP text encoders, a UNet and an `AutoencoderKL`: what Stable Diffusion 1, 2 and XL share."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.errors import FamilyError
from pipeline.models.families.base import Layer
from pipeline.models.families.noise import BetaNoise

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(attentions|resnets)\.(\d+)\.(.+)")
_MID_BLOCK = re.compile(r"mid_block\.(attentions|resnets)\.(\d+)\.(.+)")
_SAMPLER = re.compile(r"(down|up)_blocks\.(\d+)\.(?:down|up)samplers\.0\.conv")

_RESIDUAL = {
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
"""Members of a residual block to CompVis's."""


class ClipUNet(BetaNoise):
    """A UNet with attention to what CLIP makes of a caption."""

    denoiser_name = "unet"

    def size_multiple(self) -> int:
        """The VAE's factor: 8. What the UNet cannot halve evenly it interpolates itself on its way up."""
        return self.factor

    def token_limits(self) -> dict[str, int]:
        """What `encode_prompt` pads to: 77."""
        return {role: self.tokenizer_limit(role) for role in self.text_roles() if "tokenizer" in role}

    @abstractmethod
    def embed(self, encoders: Any, caption: str | list[str]) -> dict[str, Tensor]:
        """As of every family; of several captions one batch."""

    def embed_captions(self, encoders: Any, captions: Sequence[str]) -> dict[str, Tensor]:
        """As one batch."""
        return self.embed(encoders, list(captions))

    def lora_targets(self) -> list[str]:
        """Query, key, value and output of each attention, self and cross."""
        return ["to_q", "to_k", "to_v", "to_out.0"]

    def original_name(self, module: str) -> str:
        """The path in CompVis's UNet, whose blocks are numbered through all levels.

        There, a level of the way down is its residual blocks and one more block that halves; a level of the
        way up has one residual block more than on the way down. A block's member 0 is residual, its member 1
        the attention, and the last member of a level's last block on the way up doubles.

        Raises:
            FamilyError: The module is not inside of a block, or the levels differ in their blocks.
        """
        layers = self.denoiser_config.get("layers_per_block", 2)
        if isinstance(layers, int):
            if (found := _MID_BLOCK.fullmatch(module)) and (inner := _inner(found[1], found[3])):
                member = 1 if found[1] == "attentions" else 2 * int(found[2])
                return f"middle_block.{member}.{inner}"
            if (found := _BLOCK.fullmatch(module)) and (inner := _inner(found[3], found[5])):
                index = int(found[2]) * (layers + 1) + int(found[4])
                block = f"input_blocks.{index + 1}" if found[1] == "down" else f"output_blocks.{index}"
                return f"{block}.{int(found[3] == 'attentions')}.{inner}"
            if found := _SAMPLER.fullmatch(module):
                index = (int(found[2]) + 1) * (layers + 1)
                if found[1] == "down":
                    return f"input_blocks.{index}.0.op"
                attention = "CrossAttn" in self.denoiser_config["up_block_types"][int(found[2])]
                return f"output_blocks.{index - 1}.{2 if attention else 1}.conv"
        raise FamilyError(
            f"the module {module} has no name in the original code's layout",
            where=str(self.folder / "unet" / "config.json"),
            fix="adapt modules of blocks only, on a UNet with one layers_per_block for all levels",
        )

    def kohya_layer(self, module: str) -> Layer:
        """`lora_unet_` and diffusers' path with underscores."""
        return Layer("lora_unet_" + module.replace(".", "_"), (module,))

    def comfyui_key(self, module: str) -> str:
        """`diffusion_model.` and `original_name`: ComfyUI's generic keys."""
        return f"diffusion_model.{self.original_name(module)}"


def _inner(kind: str, path: str) -> str | None:
    """CompVis's path inside of an attention or a residual block; None where it has no such layer."""
    return path if kind == "attentions" else _RESIDUAL.get(path)
