"""FLUX.1 Kontext: FLUX.1 dev with the tokens of one reference image behind the latent's."""

from __future__ import annotations

from pipeline.models.families.family import FamilySpec
from pipeline.models.families.flux import FLUX
from pipeline.models.families.parts.references import KONTEXT_REFERENCES

FLUX_KONTEXT = FamilySpec(
    name="FLUX.1 Kontext",
    pipeline_classes=("FluxKontextPipeline",),
    components=FLUX.components,
    latents=FLUX.latents,
    text=FLUX.text,
    noise=FLUX.noise,
    denoiser_call="families.flux_kontext:KontextCall",
    drawing="families.flux_kontext:KontextDrawing",
    lora=FLUX.lora,
    architecture="flux-1-dev",  # as musubi-tuner names it: it has the transformer of FLUX.1 dev
    kohya_version="flux_kontext",
    guidance_scale=2.5,
    no_negative_prompts="its guidance is distilled",
    references=KONTEXT_REFERENCES,
    takes_guidance=FLUX.takes_guidance,
)
