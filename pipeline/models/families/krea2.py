"""Krea 2, base and distilled: twelve layers of a Qwen3-VL, a single-stream transformer, Qwen-Image's VAE.

Padding between a caption and the end of its template is masked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pipeline.errors import FamilyError
from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import Distillation, FamilySpec
from pipeline.models.families.parts.lora_keys import Layer, LoraKeys, underscored
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import QwenImageLatents

TOKENS = 512
"""`max_sequence_length` of the pipeline: the caption and the end of its template."""

# Tokens of the template before the caption, which are dropped, and behind it.
_PREFIX_TOKENS, _SUFFIX_TOKENS = 34, 5

# Hidden states that the pipeline uses unless the model's index names others.
_DEFAULT_LAYERS = (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)

_BLOCK = re.compile(r"(transformer_blocks|text_fusion\.(?:layerwise|refiner)_blocks)\.(\d+)\.(.+)")

# Names of a block's layers in Krea's code, by their diffusers names.
_ORIGINAL = {
    "attn.to_q": "attn.wq",
    "attn.to_k": "attn.wk",
    "attn.to_v": "attn.wv",
    "attn.to_out.0": "attn.wo",
    "attn.to_gate": "attn.gate",
    "ff.gate": "mlp.gate",
    "ff.up": "mlp.up",
    "ff.down": "mlp.down",
}

# Layer outside of the blocks that combines the layers of the language model.
_PROJECTOR = "text_fusion.projector"


def select_layers(model: ModelFolder) -> tuple[int, ...]:
    """Return the indices of the language model's hidden states that the transformer sees."""
    return tuple(model.index.get("text_encoder_select_layers") or _DEFAULT_LAYERS)


def is_distilled(model: ModelFolder) -> bool:
    """Return whether the model's index marks it as distilled."""
    return bool(model.index.get("is_distilled"))


@dataclass(frozen=True)
class Krea2Noise(FlowNoise):
    """Flow matching; a distilled model uses one fixed shift for all image sizes."""

    process: str = "families.krea2:Krea2Process"

    def timestep_facts(self, model: ModelFolder) -> dict[str, Any]:
        # A fact of the model's index, which no fingerprint contains.
        return {**super().timestep_facts(model), "is_distilled": is_distilled(model)}


@dataclass(frozen=True)
class Krea2Keys(LoraKeys):
    """Layers under their names in Krea's own code, which ComfyUI's model has too."""

    def kohya_layer(self, model: ModelFolder, module: str) -> Layer:
        return Layer(underscored(self._original_path(model, module)), (module,))

    def comfyui_key(self, model: ModelFolder, module: str) -> str:
        return f"diffusion_model.{self._original_path(model, module)}"

    def _original_path(self, model: ModelFolder, module: str) -> str:
        if module == _PROJECTOR:
            return module.replace("text_fusion", "txtfusion")
        match = _BLOCK.fullmatch(module)
        if not match or match[3] not in _ORIGINAL:
            raise FamilyError(
                f"the original code's layout does not include the module {module}",
                where=str(model.config_file("transformer")),
                fix="adapt only attention and feed-forward layers inside blocks",
            )
        blocks = match[1].replace("transformer_blocks", "blocks").replace("text_fusion", "txtfusion")
        return f"{blocks}.{match[2]}.{_ORIGINAL[match[3]]}"


def _distillation(model: ModelFolder) -> Distillation | None:
    adapter = "ostris/krea2_turbo_training_adapter/krea2_turbo_training_adapter_v1.safetensors"
    return Distillation(adapter) if is_distilled(model) else None


KREA2 = FamilySpec(
    name="Krea 2",
    pipeline_classes=("Krea2Pipeline",),
    components={
        "vae": "diffusers.AutoencoderKLQwenImage",
        "tokenizer": "transformers.AutoTokenizer",
        "text_encoder": "transformers.Qwen3VLModel",
        "transformer": "diffusers.Krea2Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=QwenImageLatents("autoencoder-kl-qwen-image normalised, 1", patch=2),
    text=LanguageModelText(
        "qwen3-vl template layers unpadded, 1",
        "families.krea2:Krea2Conditioner",
        tokens=TOKENS,
        template_tokens=_PREFIX_TOKENS - _SUFFIX_TOKENS,
        layers=lambda model: len(select_layers(model)),
    ),
    noise=Krea2Noise(),
    denoiser_call="families.krea2:Krea2Call",
    lora=Krea2Keys(list(_ORIGINAL)),
    architecture="krea-2",
    kohya_version="krea2",
    guidance_scale=4.5,
    pipeline_options=lambda model: {"text_encoder_select_layers": select_layers(model)},
    distillation=_distillation,
)
