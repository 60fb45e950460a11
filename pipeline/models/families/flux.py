"""FLUX.1 dev and schnell: T5 and a pooled CLIP, a transformer over packed latents, a VAE of 16 channels.

The transformer of dev takes a guidance scale, and its timestep shift depends on the size.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import Distillation, FamilySpec
from pipeline.models.families.parts.flux_keys import FLUX_KEYS
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.text import Shapes, TextSpec
from pipeline.models.families.parts.vae import LatentSpec


def has_guidance(model: ModelFolder) -> bool:
    """Return whether the transformer takes a guidance scale: dev does, schnell does not."""
    return bool(model.config("transformer").get("guidance_embeds"))


@dataclass(frozen=True)
class T5AndClipText(TextSpec):
    """T5's hidden states, padded, and CLIP's pooled output."""

    def token_limits(self, model: ModelFolder) -> dict[str, int]:
        # CLIP contributes only a pooled vector, so its limit does not count. Schnell takes fewer tokens.
        return {"tokenizer_2": 512 if has_guidance(model) else 256}

    def shapes(self, model: ModelFolder) -> Shapes:
        return {
            "text_embedding": (self.max_length(model), int(model.config("text_encoder_2")["d_model"])),
            "pooled_text_embedding": (int(model.config("text_encoder")["hidden_size"]),),
        }


def _distillation(model: ModelFolder) -> Distillation | None:
    return None if has_guidance(model) else Distillation("ostris/FLUX.1-schnell-training-adapter")


FLUX = FamilySpec(
    name="FLUX.1",
    pipeline_classes=("FluxPipeline",),
    components={
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.CLIPTokenizer",
        "tokenizer_2": "transformers.T5TokenizerFast",
        "text_encoder": "transformers.CLIPTextModel",
        "text_encoder_2": "transformers.T5EncoderModel",
        "transformer": "diffusers.FluxTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=LatentSpec("autoencoder-kl shifted scaled, 1", patch=2),
    text=T5AndClipText("t5 padded and clip pooled, 1", "families.flux:T5AndClipConditioner"),
    noise=FlowNoise(),
    denoiser_call="families.flux:FluxCall",
    lora=FLUX_KEYS,
    architecture=lambda model: f"flux-1-{'dev' if has_guidance(model) else 'schnell'}",
    kohya_version="flux1",
    guidance_scale=3.5,
    no_negative_prompts="its guidance is distilled",
    distillation=_distillation,
    takes_guidance=has_guidance,
)
