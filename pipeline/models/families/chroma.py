"""Chroma1 base and HD: T5 alone, a transformer of the FLUX.1 kind without guidance, a VAE of 16 channels.

The mask passes a caption's tokens and one padding token. diffusers 0.42 adds it to the attention scores,
which raises these tokens without hiding the others, so entries contain all tokens and the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.flux_keys import FLUX_KEYS
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.text import Shapes, TextSpec
from pipeline.models.families.parts.vae import LatentSpec

T5_TOKENS = 512
"""`max_sequence_length` of the pipeline."""


@dataclass(frozen=True)
class MaskedT5Text(TextSpec):
    """T5's hidden states, padded, and the mask of the tokens that count."""

    def token_limits(self, model: ModelFolder) -> dict[str, int]:
        """See `TextSpec.token_limits`."""
        return {"tokenizer": T5_TOKENS}

    def shapes(self, model: ModelFolder) -> Shapes:
        """See `TextSpec.shapes`."""
        width = int(model.config("text_encoder")["d_model"])
        return {"text_embedding": (T5_TOKENS, width), "text_mask": (T5_TOKENS,)}


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
    text=MaskedT5Text("t5 masked padded with mask, 1", "families.chroma:MaskedT5Conditioner"),
    noise=FlowNoise(),
    denoiser_call="families.chroma:ChromaCall",
    lora=FLUX_KEYS,
    architecture="chroma",
    guidance_scale=5.0,
)
