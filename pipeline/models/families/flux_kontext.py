"""FLUX.1 Kontext: FLUX.1 dev with the tokens of one reference image behind those of the latent."""

from __future__ import annotations

from dataclasses import replace

from pipeline.models.families.flux import FLUX
from pipeline.models.families.parts.references import KONTEXT_REFERENCES

FLUX_KONTEXT = replace(
    FLUX,
    name="FLUX.1 Kontext",
    pipeline_classes=("FluxKontextPipeline",),
    denoiser_call="families.flux_kontext:KontextCall",
    drawing="families.flux_kontext:KontextDrawing",
    architecture="flux-1-dev",  # as musubi-tuner names it: the transformer is that of FLUX.1 dev
    guidance_scale=2.5,
    references=KONTEXT_REFERENCES,
)
