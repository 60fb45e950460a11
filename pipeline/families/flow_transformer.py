"""What the families of a transformer that is trained by flow matching share."""

from __future__ import annotations

from pipeline.families.base import Layer
from pipeline.families.noise import FlowNoise


class FlowTransformer(FlowNoise):
    """A transformer that predicts noise minus latent."""

    denoiser_name = "transformer"

    @property
    def num_timesteps(self) -> int:
        """Of the schedule: the timestep at which the latent is all noise."""
        return int(self.scheduler_config.get("num_train_timesteps", 1000))

    def kohya_layer(self, module: str) -> Layer:
        """`lora_unet_` and diffusers' path with underscores: kohya's rule for any code."""
        return Layer("lora_unet_" + module.replace(".", "_"), (module,))

    def comfyui_key(self, module: str) -> str:
        """`transformer.` and diffusers' path: ComfyUI itself finds the part of its own model that it is."""
        return f"transformer.{module}"


def stacked(names: dict[str, tuple[str, ...]], module: str) -> tuple[str, tuple[str, ...]] | None:
    """(the original code's name, modules of its layer) of a module inside of a block; None if it has none.

    Args:
        names: Original name to the modules stacked in it, all relative to a block.
        module: Relative to the block.
    """
    return next(((name, modules) for name, modules in names.items() if module in modules), None)
