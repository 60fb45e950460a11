"""FLUX.2 klein, base and distilled: a Qwen3, a transformer over patches of a VAE of 32 channels."""

from __future__ import annotations

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import Distillation, FamilySpec
from pipeline.models.families.parts.flux_keys import FLUX2_KEYS
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.references import flux2_references
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import PatchedLatents


def _kohya_version(model: ModelFolder) -> str:
    # klein 4B has 24 heads, 9B has 32.
    heads = int(model.config("transformer")["num_attention_heads"])
    return "flux_2_klein_9b" if heads >= 32 else "flux_2_klein_4b"


FLUX2_KLEIN = FamilySpec(
    name="FLUX.2 klein",
    pipeline_classes=("Flux2KleinPipeline",),
    components={
        "vae": "diffusers.AutoencoderKLFlux2",
        "tokenizer": "transformers.Qwen2TokenizerFast",
        "text_encoder": "transformers.Qwen3ForCausalLM",
        "transformer": "diffusers.Flux2Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=PatchedLatents("autoencoder-kl-flux2 patched normalised, 1"),
    text=LanguageModelText(
        "qwen3 chat three layers padded, 1",
        "families.flux2:KleinConditioner",
        padding="stored",
        tokens=512,
        layers=3,
    ),
    # The pipelines compute a shift for their number of steps, 7.6 at 1,024 px and 50 steps. Training uses the
    # shift of the published scheduler configuration instead, 3.2 at that size, as musubi-tuner recommends.
    noise=FlowNoise(),
    denoiser_call="families.flux2:Flux2Call",
    lora=FLUX2_KEYS,
    architecture="flux-2-klein",
    kohya_version=_kohya_version,
    guidance_scale=4.0,
    # Objective 1 used the pipelines' shift.
    objective=2,
    # Maximum number: https://docs.bfl.ml/guides/prompting_editing_overview
    references=flux2_references(4),
    distillation=lambda model: Distillation() if model.index.get("is_distilled") else None,
    no_negative_prompts=lambda model: "its guidance is distilled" if model.index.get("is_distilled") else "",
)
