"""Bria FIBO: all layers of a SmolLM3, one for each block of its transformer, and Wan's VAE of 48 channels.

Captions are used as they are; users may write structured ones.
"""

from __future__ import annotations

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.flux_keys import flux_targets
from pipeline.models.families.parts.lora_keys import LoraKeys
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import WanLatents

TOKENS = 3000
"""`max_sequence_length` of the pipeline's call; captions for this model are long."""


def _num_hidden_states(model: ModelFolder) -> int:
    # The embedding of the tokens comes before the layers.
    return int(model.config("text_encoder")["num_hidden_layers"]) + 1


BRIA_FIBO = FamilySpec(
    name="Bria FIBO",
    pipeline_classes=("BriaFiboPipeline",),
    components={
        "vae": "diffusers.AutoencoderKLWan",
        "tokenizer": "transformers.AutoTokenizer",
        # Only hidden states are used, so the model is loaded without its output layer.
        "text_encoder": "transformers.SmolLM3Model",
        "transformer": "diffusers.BriaFiboTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=WanLatents("autoencoder-kl-wan normalised, 1"),
    text=LanguageModelText(
        "smollm3 all layers unpadded, 1",
        "families.bria_fibo:BriaFiboConditioner",
        tokens=TOKENS,
        layers=_num_hidden_states,
    ),
    noise=FlowNoise(),
    denoiser_call="families.bria_fibo:BriaFiboCall",
    lora=LoraKeys(flux_targets),
    architecture="bria-fibo",
    guidance_scale=5.0,
)
