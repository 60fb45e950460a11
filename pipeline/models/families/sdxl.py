"""Stable Diffusion XL: two CLIP text encoders, a UNet conditioned on sizes and crop, a VAE of 4 channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import ClipLora
from pipeline.models.families.parts.noise import BetaNoise
from pipeline.models.families.parts.text import Shapes, TextSpec, clip_length
from pipeline.models.families.parts.unet_keys import UNetKeys
from pipeline.models.families.parts.vae import ChannelScaledLatents


@dataclass(frozen=True)
class TwoClipText(TextSpec):
    """The penultimate hidden states of two CLIPs side by side, and the projection of the second one."""

    trains_encoders: ClassVar[bool] = True

    def token_limits(self, model: ModelFolder) -> dict[str, int]:
        return {role: clip_length(model, role) for role in ("tokenizer", "tokenizer_2") if model.has(role)}

    def shapes(self, model: ModelFolder) -> Shapes:
        first, second = model.config("text_encoder"), model.config("text_encoder_2")
        width = int(first["hidden_size"]) + int(second["hidden_size"])
        return {
            "text_embedding": (self.max_length(model), width),
            "pooled_text_embedding": (int(second["projection_dim"]),),
        }

    def trainable_encoders(self, model: ModelFolder) -> Mapping[str, ClipLora]:
        # The embedding is the penultimate hidden state of both, so the first encoder's last layer is unused.
        # The second encoder's last layer feeds its projection.
        first, second = (
            int(model.config(role)["num_hidden_layers"]) for role in ("text_encoder", "text_encoder_2")
        )
        return {
            "text_encoder": ClipLora("lora_te1", "clip_l", first - 1),
            "text_encoder_2": ClipLora("lora_te2", "clip_g", second),
        }


STABLE_DIFFUSION_XL = FamilySpec(
    name="Stable Diffusion XL",
    pipeline_classes=("StableDiffusionXLPipeline",),
    components={
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.CLIPTokenizer",
        "tokenizer_2": "transformers.CLIPTokenizer",
        "text_encoder": "transformers.CLIPTextModel",
        "text_encoder_2": "transformers.CLIPTextModelWithProjection",
        "unet": "diffusers.UNet2DConditionModel",
        "scheduler": "diffusers.DDPMScheduler",
    },
    latents=ChannelScaledLatents("autoencoder-kl scaled, 1", patch=1),
    text=TwoClipText("two clips penultimate padded, 1", "families.sdxl:TwoClipConditioner"),
    noise=BetaNoise(),
    denoiser_name="unet",
    denoiser_call="denoiser:SizedUNetCall",
    lora=UNetKeys(kohya_original=True),
    architecture="stable-diffusion-xl-v1-base",
    kohya_version="sdxl_base_v1-0",
    guidance_scale=5.0,
    pipeline_options=lambda model: {"add_watermarker": False},
    forces_zeros=True,
)
