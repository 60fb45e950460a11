"""Z-Image and Z-Image-Turbo: a Qwen3, a single-stream transformer, a VAE of 16 channels."""

from __future__ import annotations

from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import LoraKeys
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import LatentSpec

Z_IMAGE = FamilySpec(
    name="Z-Image",
    pipeline_classes=("ZImagePipeline",),
    components={
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.Qwen2TokenizerFast",
        "text_encoder": "transformers.Qwen3Model",
        "transformer": "diffusers.ZImageTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=LatentSpec(
        "autoencoder-kl shifted scaled, 1",
        patch=lambda model: int(model.config("transformer")["all_patch_size"][0]),
    ),
    text=LanguageModelText(
        "qwen3 chat penultimate unpadded, 2", "families.z_image:ZImageConditioner", tokens=512
    ),
    noise=FlowNoise(),
    denoiser_call="families.z_image:ZImageCall",
    lora=LoraKeys(
        [
            *(f"attention.{end}" for end in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"feed_forward.w{number}" for number in (1, 2, 3)),
        ],
        kohya_readable=True,
    ),
    architecture="z-image",
    guidance_scale=4.0,
)
