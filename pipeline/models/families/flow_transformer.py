"""What the families of a transformer that is trained by flow matching share."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pipeline.errors import FamilyError
from pipeline.models.families.base import Layer
from pipeline.models.families.noise import FlowNoise


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

    def layer_in_block(
        self, module: str, block: re.Pattern[str], names: Mapping[str, tuple[str, ...]]
    ) -> tuple[str, str, tuple[str, ...]]:
        """(which block, the original code's name, modules of its layer) of a module inside of a block.

        Args:
            module: Its path in the denoiser.
            block: Matches such paths; its groups are what tells the block, and the path inside of it.
            names: As `stacked` takes them.

        Raises:
            FamilyError: It is in no such block, or no layer there has a name.
        """
        found = block.fullmatch(module)
        layer = stacked(names, found[2]) if found else None
        if not found or not layer:
            raise FamilyError(
                f"the module {module} has no name in kohya's layout",
                where=str(self.folder / self.denoiser_name / "config.json"),
                fix="adapt attention and feed-forward layers of blocks only",
            )
        return found[1], *layer

    def comfyui_key(self, module: str) -> str:
        """`transformer.` and diffusers' path: ComfyUI itself finds the part of its own model that it is."""
        return f"transformer.{module}"


def stacked(names: Mapping[str, tuple[str, ...]], module: str) -> tuple[str, tuple[str, ...]] | None:
    """(the original code's name, modules of its layer) of a module inside of a block; None if it has none.

    Args:
        names: Original name to the modules stacked in it, all relative to a block.
        module: Relative to the block.
    """
    return next(((name, modules) for name, modules in names.items() if module in modules), None)
