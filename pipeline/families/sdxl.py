"""Stable Diffusion XL: two CLIP text encoders, a UNet told of sizes and crop, a VAE of 4 channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.families.base import Layer, Shapes
from pipeline.families.clip_text import TrainableClip
from pipeline.families.sized_unet import SizedUNet

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
    guidance_scale = 5.0

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
