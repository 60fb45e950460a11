"""Kolors: a ChatGLM whose padding the UNet sees, Stable Diffusion XL's UNet and VAE."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.noise import BetaNoise
from pipeline.models.families.parts.text import Shapes, TextSpec
from pipeline.models.families.parts.unet_keys import UNetKeys
from pipeline.models.families.parts.vae import LatentSpec

TOKENS = 256
"""`max_sequence_length` of the pipeline, two start marks included."""


@dataclass(frozen=True)
class ChatGlmText(TextSpec):
    """The penultimate hidden states, padded, and the last token's last hidden state."""

    def token_limits(self, model: ModelFolder) -> dict[str, int]:
        """See `TextSpec.token_limits`."""
        return {"tokenizer": TOKENS}

    def shapes(self, model: ModelFolder) -> Shapes:
        """See `TextSpec.shapes`."""
        width = int(model.config("text_encoder")["hidden_size"])
        return {"text_embedding": (TOKENS, width), "pooled_text_embedding": (width,)}


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
    text=ChatGlmText("chatglm penultimate padded, 1", "families.kolors:ChatGlmConditioner"),
    noise=BetaNoise(),
    denoiser_name="unet",
    denoiser_call="denoiser:SizedUNetCall",
    lora=UNetKeys(),
    architecture="kolors",
    guidance_scale=5.0,
)
