"""Lumina Image 2: a Gemma 2 behind a system prompt, a single-stream transformer, a VAE of 16 channels."""

from __future__ import annotations

from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import BlockNames, StackedKeys
from pipeline.models.families.parts.noise import FLUX_SHIFT, FlowNoise
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import LatentSpec

_BLOCKS = BlockNames(
    "layers|noise_refiner|context_refiner",
    {
        "attention.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "attention.out": ("attn.to_out.0",),
        **{f"feed_forward.w{number}": (f"feed_forward.linear_{number}",) for number in (1, 2, 3)},
    },
)

LUMINA2 = FamilySpec(
    name="Lumina Image 2",
    pipeline_classes=("Lumina2Pipeline",),
    components={
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.GemmaTokenizerFast",
        "text_encoder": "transformers.Gemma2Model",
        "transformer": "diffusers.Lumina2Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=LatentSpec("autoencoder-kl shifted scaled, 1"),
    text=LanguageModelText(
        "gemma2 prompted penultimate unpadded, 2", "families.lumina2:Lumina2Conditioner", tokens=256
    ),
    # The published schedule, with a shift of 6, is for drawing. Training uses the shift of the original
    # training code: https://github.com/Alpha-VLLM/Lumina-Image-2.0/blob/main/transport/transport.py.
    noise=FlowNoise(training_schedule=lambda model: FLUX_SHIFT),
    denoiser_call="families.lumina2:Lumina2Call",
    # ComfyUI's names of diffusers' modules exist for Z-Image alone, so its file uses the stacked layers.
    lora=StackedKeys(_BLOCKS.modules, blocks=(_BLOCKS,), comfyui_as_kohya=True),
    architecture="lumina-2",
    kohya_version="lumina2",
    guidance_scale=4.0,
    # Objective 1 used the published schedule.
    objective=2,
    no_negative_prompts="its pipeline encodes negative prompts in another way than captions",
)
