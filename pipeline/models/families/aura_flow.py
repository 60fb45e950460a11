"""AuraFlow: a multilingual T5, a transformer of joint and single blocks, a VAE of 4 channels.

Captions are padded with zeros, on the side where the tokenizer pads.
"""

from __future__ import annotations

from math import isqrt

from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import LoraKeys
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import LatentSpec

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

AURA_FLOW = FamilySpec(
    name="AuraFlow",
    pipeline_classes=("AuraFlowPipeline",),
    components={
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.LlamaTokenizerFast",
        "text_encoder": "transformers.UMT5EncoderModel",
        "transformer": "diffusers.AuraFlowTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    # The transformer's table of positions is a square.
    latents=LatentSpec(
        "autoencoder-kl scaled, 1",
        max_patches=lambda model: isqrt(int(model.config("transformer")["pos_embed_max_size"])),
    ),
    text=LanguageModelText(
        "umt5 masked unpadded, 2",
        "families.aura_flow:ZeroPaddedT5Conditioner",
        padding="zeros",
        tokens=256,
    ),
    noise=FlowNoise(),
    denoiser_call="families.aura_flow:AuraFlowCall",
    lora=LoraKeys(
        [f"attn.{end}" for end in _ATTENTION],
        kohya_note="ComfyUI ignores all layers in this file. Load the file whose name ends in _comfyui.",
    ),
    architecture="auraflow",
    guidance_scale=3.5,
)
