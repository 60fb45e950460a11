"""FLUX.1 Kontext: FLUX.1 dev with the tokens of one reference image behind the latent's."""

from __future__ import annotations

from pipeline.models.families.family import FamilySpec
from pipeline.models.families.flux import T5AndClipText
from pipeline.models.families.parts.flux_keys import FLUX_KEYS
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.references import KONTEXT_REFERENCES
from pipeline.models.families.parts.vae import LatentSpec

FLUX_KONTEXT = FamilySpec(
    name="FLUX.1 Kontext",
    pipeline_classes=("FluxKontextPipeline",),
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
    denoiser_call="families.flux_kontext:KontextCall",
    drawing="families.flux_kontext:KontextDrawing",
    lora=FLUX_KEYS,
    architecture="flux-1-dev",  # as musubi-tuner names it: it has the transformer of FLUX.1 dev
    guidance_scale=2.5,
    no_negative_prompts="its guidance is distilled",
    references=KONTEXT_REFERENCES,
)
