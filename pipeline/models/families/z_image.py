"""Z-Image and Z-Image-Turbo: a Qwen3, a single-stream transformer, a VAE of 16 channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import Distillation, FamilySpec
from pipeline.models.families.parts.lora_keys import LoraKeys
from pipeline.models.families.parts.noise import FLUX_SHIFT, FlowNoise
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import LatentSpec

# In the schedule of Z-Image-Turbo, which has the same configurations as Z-Image otherwise.
_TURBO_SHIFT = 3.0


def is_turbo(model: ModelFolder) -> bool:
    """Return whether the model has the schedule of Z-Image-Turbo."""
    schedule = model.config("scheduler")
    return schedule.get("shift") == _TURBO_SHIFT and not schedule.get("use_dynamic_shifting")


def _training_schedule(model: ModelFolder) -> Mapping[str, Any]:
    # Z-Image's schedule, with a shift of 6, is for drawing. Training uses FLUX.1's shift, as section 4.3 of
    # https://arxiv.org/abs/2511.22699 describes. Z-Image-Turbo is trained with its own schedule.
    return {} if is_turbo(model) else FLUX_SHIFT


def _distillation(model: ModelFolder) -> Distillation | None:
    adapter = "ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v2.safetensors"
    return Distillation(adapter) if is_turbo(model) else None


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
    noise=FlowNoise(training_schedule=_training_schedule),
    denoiser_call="families.z_image:ZImageCall",
    lora=LoraKeys(
        [
            *(f"attention.{end}" for end in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"feed_forward.w{number}" for number in (1, 2, 3)),
        ],
        kohya_readable=True,
        kohya_note="ComfyUI ignores the attention layers in this file. Load the file whose name ends in "
        "_comfyui.",
    ),
    architecture="z-image",
    kohya_version="z_image",
    guidance_scale=4.0,
    # Objective 1 of Z-Image used the published schedule.
    objective=lambda model: 1 if is_turbo(model) else 2,
    distillation=_distillation,
)
