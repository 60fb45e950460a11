"""CLIP text encoders, a UNet and an `AutoencoderKL`: what Stable Diffusion 1, 2 and XL share."""

from __future__ import annotations

import re

from pipeline.errors import FamilyError
from pipeline.families.base import Layer
from pipeline.families.noise import BetaNoise

_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.attentions\.(\d+)\.(.+)")
_MID_BLOCK = re.compile(r"mid_block\.attentions\.0\.(.+)")


class ClipUNet(BetaNoise):
    """A UNet with attention to what CLIP makes of a caption."""

    denoiser_name = "unet"

    def size_multiple(self) -> int:
        """The VAE's factor: 8. What the UNet cannot halve evenly it interpolates itself on its way up."""
        return self.factor

    def token_limits(self) -> dict[str, int]:
        """What `encode_prompt` pads to: 77."""
        return {role: self.tokenizer_limit(role) for role in self.text_roles() if "tokenizer" in role}

    def lora_targets(self) -> list[str]:
        """Query, key, value and output of each attention, self and cross."""
        return ["to_q", "to_k", "to_v", "to_out.0"]

    def original_name(self, module: str) -> str:
        """The path in CompVis's UNet, whose blocks are numbered through all levels.

        There, a level of the way down is its residual blocks and one more block that halves; a level of the
        way up has one residual block more than on the way down, and each block's attention is its member 1.

        Raises:
            FamilyError: The module is not inside of an attention, or the levels differ in their blocks.
        """
        if found := _MID_BLOCK.fullmatch(module):
            return f"middle_block.1.{found[1]}"
        if found := _BLOCK.fullmatch(module):
            layers = self.denoiser_config.get("layers_per_block", 2)
            if isinstance(layers, int):
                index = int(found[2]) * (layers + 1) + int(found[3])
                side = f"input_blocks.{index + 1}" if found[1] == "down" else f"output_blocks.{index}"
                return f"{side}.1.{found[4]}"
        raise FamilyError(
            f"the module {module} has no name in the original code's layout",
            where=str(self.folder / "unet" / "config.json"),
            fix="adapt attention modules only, on a UNet with one layers_per_block for all levels",
        )

    def kohya_layer(self, module: str) -> Layer:
        """`lora_unet_` and diffusers' path with underscores."""
        return Layer("lora_unet_" + module.replace(".", "_"), (module,))

    def comfyui_key(self, module: str) -> str:
        """`diffusion_model.` and `original_name`: ComfyUI's generic keys."""
        return f"diffusion_model.{self.original_name(module)}"
