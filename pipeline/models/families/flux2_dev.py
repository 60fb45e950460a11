"""FLUX.2 dev: klein's transformer with a guidance scale, conditioned on a Mistral 3 with a system message."""

from __future__ import annotations

from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.flux_keys import FLUX2_KEYS
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.references import flux2_references
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import PatchedLatents

FLUX2_DEV = FamilySpec(
    name="FLUX.2 dev",
    pipeline_classes=("Flux2Pipeline",),
    components={
        "vae": "diffusers.AutoencoderKLFlux2",
        # The processor is not loaded: captions need no images, and its image processor requires torchvision.
        "tokenizer": "transformers.AutoTokenizer",
        "text_encoder": "transformers.Mistral3ForConditionalGeneration",
        "transformer": "diffusers.Flux2Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=PatchedLatents("autoencoder-kl-flux2 patched normalised, 1"),
    text=LanguageModelText(
        "mistral3 chat three layers padded, 1",
        "families.flux2_dev:DevConditioner",
        padding="stored",
        adds_special_tokens=False,
        tokens=512,
        layers=3,
    ),
    noise=FlowNoise(),
    denoiser_call="families.flux2_dev:GuidedFlux2Call",
    lora=FLUX2_KEYS,
    architecture="flux-2-dev",
    kohya_version="flux_2_dev",
    guidance_scale=4.0,
    # Noise levels and objective are the same as for FLUX.2 klein.
    objective=2,
    # Recommended number: https://docs.bfl.ml/guides/prompting_editing_overview
    references=flux2_references(6),
    no_negative_prompts="its guidance is distilled",
    takes_guidance=lambda model: True,
)
