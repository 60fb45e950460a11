"""A CLIP text encoder whose LoRA diffusers' loaders, kohya's tools and ComfyUI take. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.errors import FamilyError

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
_FEED_FORWARD = ("mlp.fc1", "mlp.fc2")
_MODEL = "text_model."
"""Stands before the paths of the layers; not in all of transformers' classes, but in every file."""

TextTargets = Literal["attention", "blocks"]


@dataclass(frozen=True)
class TrainableClip:
    """What an adapter of the encoder is called.

    Attributes:
        kohya: How its keys begin in kohya's layout (`LoRANetwork` in networks/lora.py of
            github.com/kohya-ss/sd-scripts).
        comfyui: The encoder's name in ComfyUI (`model_lora_keys_clip` in comfy/lora.py of
            github.com/comfyanonymous/ComfyUI, its "generic" keys).
        num_layers: How many of its layers decide the embeddings: what comes after has nothing to learn from.
    """

    kohya: str
    comfyui: str
    num_layers: int

    def targets(self, which: TextTargets) -> list[str]:
        """Endings of the modules that get an adapter, for `peft.LoraConfig.target_modules`."""
        layers = _ATTENTION if which == "attention" else (*_ATTENTION, *_FEED_FORWARD)
        return [f"encoder.layers.{number}.{layer}" for number in range(self.num_layers) for layer in layers]

    def keys(self, role: str, module: str) -> tuple[str, str, str]:
        """The module's keys, without `.lora_down.weight` and the like, for diffusers, kohya and ComfyUI.

        Args:
            role: The encoder's component in the pipeline.
            module: Dotted path in transformers' model.

        Raises:
            FamilyError: The module is none of an encoder layer.
        """
        path = module.removeprefix(_MODEL)
        if not path.startswith("encoder.layers."):
            raise FamilyError(
                f"the module {module} of {role} has no name in LoRA files",
                where=role,
                fix="report this as a defect: only layers of the encoder get adapters",
            )
        inside = _MODEL + path
        kohya = f"{self.kohya}_{inside.replace('.', '_')}"
        return f"{role}.{inside}", kohya, f"text_encoders.{self.comfyui}.transformer.{inside}"
