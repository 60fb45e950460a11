"""CogView4: a GLM, a transformer conditioned on sizes and crop, a VAE of 16 channels.

The embedding of a caption is as long as the caption, rounded up to 16 tokens.
"""

from __future__ import annotations

from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import LoraKeys
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import LatentSpec

COGVIEW4 = FamilySpec(
    name="CogView4",
    pipeline_classes=("CogView4Pipeline",),
    components={
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.PreTrainedTokenizerFast",
        "text_encoder": "transformers.GlmModel",
        "transformer": "diffusers.CogView4Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=LatentSpec("autoencoder-kl shifted scaled, 1"),
    text=LanguageModelText(
        "glm penultimate unpadded, 2", "families.cogview4:CogView4Conditioner", tokens=1024
    ),
    noise=FlowNoise("families.cogview4:CogView4Process"),
    denoiser_call="families.cogview4:CogView4Call",
    lora=LoraKeys(["attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"]),
    architecture="cogview-4",
    guidance_scale=5.0,
)
