"""Kolors: a ChatGLM with padding that the UNet sees, Stable Diffusion XL's UNet and VAE."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.noise import BetaNoise
from pipeline.models.families.parts.text import LanguageModelText, Shapes
from pipeline.models.families.parts.unet_keys import UNetKeys
from pipeline.models.families.parts.vae import LatentSpec


@dataclass(frozen=True)
class ChatGlmText(LanguageModelText):
    """The penultimate hidden states, padded, and the last token's last hidden state."""

    def shapes(self, model: ModelFolder) -> Shapes:
        return {**super().shapes(model), "pooled_text_embedding": (self.hidden_size(model),)}


KOLORS = FamilySpec(
    name="Kolors",
    pipeline_classes=("KolorsPipeline",),
    components={
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "diffusers.pipelines.kolors.ChatGLMTokenizer",
        "text_encoder": "diffusers.pipelines.kolors.ChatGLMModel",
        "unet": "diffusers.UNet2DConditionModel",
        "scheduler": "diffusers.DDPMScheduler",
    },
    latents=LatentSpec("autoencoder-kl scaled, 1", patch=1),
    # Two start marks count as tokens.
    text=ChatGlmText(
        "chatglm penultimate padded, 1", "families.kolors:ChatGlmConditioner", padding="stored", tokens=256
    ),
    noise=BetaNoise(),
    denoiser_name="unet",
    denoiser_call="denoiser:SizedUNetCall",
    lora=UNetKeys(),
    architecture="kolors",
    guidance_scale=5.0,
)
