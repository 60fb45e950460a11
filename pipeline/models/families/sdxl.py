"""Stable Diffusion XL: two CLIP text encoders, a UNet told of sizes and crop, a VAE of 4 channels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.models.families.base import Layer, Shapes
from pipeline.models.families.clip_text import TrainableClip
from pipeline.models.families.sized_unet import SizedUNet

if TYPE_CHECKING:
    from torch import Tensor


class StableDiffusionXL(SizedUNet):
    """Stable Diffusion XL and its fine-tunes, with epsilon or v-prediction."""

    name = "Stable Diffusion XL"
    pipeline_classes = ("StableDiffusionXLPipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.CLIPTokenizer",
        "tokenizer_2": "transformers.CLIPTokenizer",
        "text_encoder": "transformers.CLIPTextModel",
        "text_encoder_2": "transformers.CLIPTextModelWithProjection",
        "unet": "diffusers.UNet2DConditionModel",
        "scheduler": "diffusers.DDPMScheduler",
    }
    latent_method = "autoencoder-kl scaled, 1"
    text_method = "two clips penultimate padded, 1"
    trains_text_encoders = True
    guidance_scale = 5.0

    def method_of_latents(self) -> str:
        """Another, where the VAE has a mean and a deviation of each channel, as Playground 2.5's has."""
        return (
            self.latent_method if self.channel_statistics is None else "autoencoder-kl by channel scaled, 1"
        )

    @cached_property
    def channel_statistics(self) -> tuple[list[float], list[float]] | None:
        """Mean and deviation of each channel of raw latents; None where the configuration has not both."""
        mean, std = (self.vae_config.get(name) for name in ("latents_mean", "latents_std"))
        return None if mean is None or std is None else (mean, std)

    def normalise(self, raw_latent: Tensor) -> Tensor:
        """(raw_latent - mean) * scaling / deviation, as diffusers' image-to-image pipeline has it."""
        if self.channel_statistics is None:
            return super().normalise(raw_latent)
        mean, std = (raw_latent.new_tensor(each)[:, None, None] for each in self.channel_statistics)
        return super().normalise(raw_latent - mean) / std

    def denormalise(self, latent: Tensor) -> Tensor:
        """The inverse: latent * deviation / scaling + mean, as diffusers' pipeline draws."""
        if self.channel_statistics is None:
            return super().denormalise(latent)
        mean, std = (latent.new_tensor(each)[:, None, None] for each in self.channel_statistics)
        return super().denormalise(latent * std) + mean

    def pipeline_options(self) -> dict[str, Any]:
        """No watermark in previews."""
        return {"add_watermarker": False}

    def text_shapes(self) -> Shapes:
        """Both encoders' hidden states side by side, and the second one's projection; padded to T."""
        first, second = self.config("text_encoder"), self.config("text_encoder_2")
        width = int(first["hidden_size"]) + int(second["hidden_size"])
        return {
            "text_embedding": (self.max_length(), width),
            "pooled_text_embedding": (int(second["projection_dim"]),),
        }

    def modelspec_architecture(self) -> str:
        """The one name for the base model and all fine-tunes of it."""
        return "stable-diffusion-xl-v1-base"

    def kohya_layer(self, module: str) -> Layer:
        """`lora_unet_` and Stability AI's path with underscores."""
        return Layer("lora_unet_" + self.original_name(module).replace(".", "_"), (module,))

    def trainable_text_encoders(self) -> Mapping[str, TrainableClip]:
        """Both; of the first not the last layer, which is not asked: the second's is, for its projection."""
        first, second = (
            int(self.config(role)["num_hidden_layers"]) for role in ("text_encoder", "text_encoder_2")
        )
        return {
            "text_encoder": TrainableClip("lora_te1", "clip_l", first - 1),
            "text_encoder_2": TrainableClip("lora_te2", "clip_g", second),
        }

    def embed(self, encoders: Any, caption: str | list[str]) -> dict[str, Tensor]:
        """`StableDiffusionXLPipeline.encode_prompt`."""
        embedding, _, pooled, _ = encoders.encode_prompt(
            caption, device=encoders.device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}
