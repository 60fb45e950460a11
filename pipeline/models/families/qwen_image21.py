"""Qwen-Image 2.1: a Qwen3-VL, a single-stream transformer, an RGBA VAE of 64 channels, references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import Distillation, FamilySpec
from pipeline.models.families.parts.lora_keys import LoraKeys
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.references import QWEN_IMAGE21_REFERENCES
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import QwenImageLatents

# Of caption and template. The pipeline has no limit, and never cuts a caption.
_PROMPT_TOKENS = 2048

# Of an embedding, with the tokens that the template adds for three images.
_TOKENS = _PROMPT_TOKENS + 64

# Edge, in tokens, of the squares that the transformer counts an image in.
_SLOT = 2


@dataclass(frozen=True)
class QwenImage21Latents(QwenImageLatents):
    """Latents of one opaque frame of `AutoencoderKLQwenImage21`; each position is a token."""

    codec: str = "families.qwen_image21:OpaqueFrameCodec"
    patch: int = 1

    def size_multiple(self, model: ModelFolder) -> int:
        # Both edges of a latent must be even.
        return _SLOT * super().size_multiple(model)


@dataclass(frozen=True)
class QwenImage21Text(LanguageModelText):
    """Hidden states of the caption and of the template without its system message."""

    tokens: int = _TOKENS

    def token_limits(self, model: ModelFolder) -> dict[str, int]:
        # Without images, and without the system message, which is dropped.
        return {"processor": _PROMPT_TOKENS}


def sample_sigmas(model: ModelFolder) -> list[float] | None:
    """Return the noise levels that a distilled model is drawn at; None if the model is not distilled."""
    return model.index.get("sample_sigmas")


def _pipeline_options(model: ModelFolder) -> Mapping[str, Any]:
    return {"sample_sigmas": sample_sigmas(model)}


def _distillation(model: ModelFolder) -> Distillation | None:
    return Distillation() if sample_sigmas(model) else None


QWEN_IMAGE21 = FamilySpec(
    name="Qwen-Image 2.1",
    pipeline_classes=("QwenImage21Pipeline",),
    components={
        "vae": "diffusers.AutoencoderKLQwenImage21",
        # The complete processor would require torchvision, so its tokenizer and the PIL version of its image
        # processor are loaded.
        "processor": "transformers.AutoTokenizer",
        "text_encoder": "transformers.Qwen3VLForConditionalGeneration",
        "transformer": "diffusers.QwenImage21Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=QwenImage21Latents("autoencoder-kl-qwen-image21 opaque normalised, 1"),
    text=QwenImage21Text(
        "qwen3-vl template last layer unnormalised unpadded, 1",
        "families.qwen_image21:QwenImage21Conditioner",
        adds_special_tokens=False,
    ),
    noise=FlowNoise(),
    denoiser_call="families.qwen_image21:QwenImage21Call",
    drawing="families.qwen_image21:QwenImage21Drawing",
    lora=LoraKeys(
        [
            *(f"attn.{end}" for end in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"img_mlp.{end}" for end in ("gate_layer", "proj", "out")),
        ],
        kohya_note="ComfyUI combines img_mlp.gate_layer and img_mlp.proj in one layer, and ignores them in "
        "this file. Load the file whose name ends in _comfyui.",
    ),
    architecture="qwen-image-2.1",
    guidance_scale=1.0,
    pipeline_options=_pipeline_options,
    distillation=_distillation,
    references=QWEN_IMAGE21_REFERENCES,
)
