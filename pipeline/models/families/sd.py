"""Stable Diffusion 1.x and 2.x: one CLIP text encoder, a UNet, a VAE of 4 channels and factor 8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.models.families.base import Conditions, Shapes
from pipeline.models.families.clip_text import TrainableClip
from pipeline.models.families.clip_unet import ClipUNet

if TYPE_CHECKING:
    from torch import Tensor, nn


class StableDiffusion(ClipUNet):
    """Stable Diffusion 1.x and 2.x, with epsilon or v-prediction."""

    name = "Stable Diffusion 1.x and 2.x"
    pipeline_classes = ("StableDiffusionPipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.CLIPTokenizer",
        "text_encoder": "transformers.CLIPTextModel",
        "unet": "diffusers.UNet2DConditionModel",
        "scheduler": "diffusers.DDPMScheduler",
    }
    latent_method = "autoencoder-kl scaled, 1"
    text_method = "clip last hidden state padded, 1"
    trains_text_encoders = True
    guidance_scale = 7.5

    def pipeline_options(self) -> dict[str, Any]:
        """No safety checker, and no warning of its absence."""
        return {"requires_safety_checker": False}

    def text_shapes(self) -> Shapes:
        """`text_embedding` (T, D): always padded to T, as the model was trained."""
        return {"text_embedding": (self.max_length(), int(self.config("text_encoder")["hidden_size"]))}

    def modelspec_architecture(self) -> str:
        """SD 2.x is known by its wider text embeddings, and its 768 px models by their v-prediction."""
        if self.denoiser_config.get("cross_attention_dim") != 1024:
            return "stable-diffusion-v1"
        return "stable-diffusion-v2-" + ("512" if self.prediction_type() == "epsilon" else "768-v")

    def trainable_text_encoders(self) -> Mapping[str, TrainableClip]:
        """The one there is, all of it: ComfyUI calls SD 2.x's clip_h, and SD 1.x's clip_l."""
        config = self.config("text_encoder")
        name = "clip_h" if int(config["hidden_size"]) == 1024 else "clip_l"
        return {"text_encoder": TrainableClip("lora_te", name, int(config["num_hidden_layers"]))}

    def embed(self, encoders: Any, caption: str | list[str]) -> dict[str, Tensor]:
        """`StableDiffusionPipeline.encode_prompt`."""
        embedding, _ = encoders.encode_prompt(
            caption, encoders.device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        return {"text_embedding": embedding}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The UNet's sample; of `conditions` it takes `text_embedding` (B, T, D)."""
        return denoiser(noisy, timesteps, encoder_hidden_states=conditions["text_embedding"]).sample

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption."""
        return {
            "prompt_embeds": text["text_embedding"],
            "negative_prompt_embeds": empty_text["text_embedding"],
        }


STABLE_DIFFUSION = StableDiffusion
