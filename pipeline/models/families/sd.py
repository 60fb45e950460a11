"""Stable Diffusion 1.x and 2.x: one CLIP text encoder, a UNet, a VAE of 4 channels and factor 8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import ClipLora
from pipeline.models.families.parts.noise import BetaNoise
from pipeline.models.families.parts.text import Shapes, TextSpec, clip_length
from pipeline.models.families.parts.unet_keys import UNetKeys
from pipeline.models.families.parts.vae import LatentSpec


@dataclass(frozen=True)
class OneClipText(TextSpec):
    """The last hidden state of one CLIP text encoder, padded to its full length as the model was trained."""

    trains_encoders: ClassVar[bool] = True

    def token_limits(self, model: ModelFolder) -> dict[str, int]:
        return {"tokenizer": clip_length(model)}

    def shapes(self, model: ModelFolder) -> Shapes:
        return {"text_embedding": (clip_length(model), int(model.config("text_encoder")["hidden_size"]))}

    def trainable_encoders(self, model: ModelFolder) -> Mapping[str, ClipLora]:
        config = model.config("text_encoder")

        # ComfyUI names the encoder of SD 2.x, which is wider, clip_h.
        name = "clip_h" if int(config["hidden_size"]) == 1024 else "clip_l"
        return {"text_encoder": ClipLora("lora_te", name, int(config["num_hidden_layers"]))}


_NOISE = BetaNoise()


def _architecture(model: ModelFolder) -> str:
    # SD 2.x has wider text embeddings, and its 768 px models predict v.
    if model.config("unet").get("cross_attention_dim") != 1024:
        return "stable-diffusion-v1"
    return "stable-diffusion-v2-" + ("512" if _NOISE.prediction_type(model) == "epsilon" else "768-v")


def _kohya_version(model: ModelFolder) -> str:
    # As `get_model_version_str_for_sd1_sd2` of sd-scripts.
    version = "sd_v2" if _architecture(model).startswith("stable-diffusion-v2") else "sd_v1"
    return f"{version}_v" if _NOISE.prediction_type(model) == "v_prediction" else version


STABLE_DIFFUSION = FamilySpec(
    name="Stable Diffusion 1.x and 2.x",
    pipeline_classes=("StableDiffusionPipeline",),
    components={
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.CLIPTokenizer",
        "text_encoder": "transformers.CLIPTextModel",
        "unet": "diffusers.UNet2DConditionModel",
        "scheduler": "diffusers.DDPMScheduler",
    },
    latents=LatentSpec("autoencoder-kl scaled, 1", patch=1),
    text=OneClipText("clip last hidden state padded, 1", "families.sd:OneClipConditioner"),
    noise=_NOISE,
    denoiser_name="unet",
    denoiser_call="denoiser:UNetCall",
    lora=UNetKeys(),
    architecture=_architecture,
    kohya_version=_kohya_version,
    guidance_scale=7.5,
    pipeline_options=lambda model: {"requires_safety_checker": False},
)
