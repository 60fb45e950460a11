"""Chroma1 base and HD: T5 alone, a transformer of the FLUX.1 kind without guidance, a VAE of 16 channels.

The mask passes a caption's tokens and one padding token. Entries contain all tokens and the mask as a float,
as the pipeline returns it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.flux_keys import FLUX_KEYS
from pipeline.models.families.parts.noise import NO_SHIFT, FlowNoise
from pipeline.models.families.parts.text import LanguageModelText, Shapes
from pipeline.models.families.parts.vae import LatentSpec


@dataclass(frozen=True)
class MaskedT5Text(LanguageModelText):
    """T5's hidden states, padded, and the mask of the tokens that count."""

    def shapes(self, model: ModelFolder) -> Shapes:
        return {**super().shapes(model), "text_mask": (self.tokens,)}


CHROMA = FamilySpec(
    name="Chroma",
    pipeline_classes=("ChromaPipeline",),
    components={
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.T5TokenizerFast",
        "text_encoder": "transformers.T5EncoderModel",
        "transformer": "diffusers.ChromaTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=LatentSpec("autoencoder-kl shifted scaled, 1", patch=2),
    text=MaskedT5Text(
        "t5 masked padded with mask, 1", "families.chroma:MaskedT5Conditioner", padding="stored", tokens=512
    ),
    # The published schedule, FLUX.1's shift, is for drawing. Training uses the density of the original
    # training code, without a shift: src/trainer/train_chroma_lora.py in
    # https://github.com/lodestone-rock/flow.
    noise=FlowNoise(density="parabola", training_schedule=lambda model: NO_SHIFT),
    denoiser_call="families.chroma:ChromaCall",
    lora=FLUX_KEYS,
    architecture="chroma",
    kohya_version="chroma",
    guidance_scale=5.0,
    # Objective 2 hides the masked tokens. Objective 1 added the mask to the attention scores, as the pipeline
    # of diffusers 0.42 does.
    objective=2,
)
