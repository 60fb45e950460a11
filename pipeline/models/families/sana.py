"""Sana: a Gemma 2 behind an instruction, a linear transformer, an autoencoder of factor 32."""

from __future__ import annotations

from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import LoraKeys
from pipeline.models.families.parts.noise import SolverFlowNoise
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import DeepCompressionLatents

SANA = FamilySpec(
    name="Sana",
    pipeline_classes=("SanaPipeline",),
    components={
        "vae": "diffusers.AutoencoderDC",
        "tokenizer": "transformers.GemmaTokenizerFast",
        "text_encoder": "transformers.Gemma2Model",
        "transformer": "diffusers.SanaTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=DeepCompressionLatents("autoencoder-dc scaled, 1"),
    # Of the instruction's tokens only the first one is part of the embedding.
    text=LanguageModelText(
        "gemma2 instructed last hidden state unpadded, 2", "families.sana:SanaConditioner", tokens=300
    ),
    noise=SolverFlowNoise(),
    denoiser_call="families.sana:SanaCall",
    lora=LoraKeys(["to_q", "to_k", "to_v", "to_out.0"]),
    architecture="sana",
    guidance_scale=4.5,
    no_negative_prompts="its pipeline encodes negative prompts in another way than captions",
)
