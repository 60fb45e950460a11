"""ERNIE-Image: a Mistral 3 language model, a single-stream transformer, FLUX.2's VAE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.models.families.base import Conditions
from pipeline.models.families.flux2_latents import Flux2Latents
from pipeline.models.families.language import unpadded

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOKENS = 2048
"""Of captions here; the pipeline takes as many as its tokenizer does, which may be any number."""

_VARIANCE_FLOOR = 1e-5
"""Of the pipeline, whatever the VAE's configuration says."""


class ErnieImage(Flux2Latents):
    """ERNIE-Image, trained on captions as they are: without the model that rewrites prompts for it."""

    name = "ERNIE-Image"
    pipeline_classes = ("ErnieImagePipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKLFlux2",
        "tokenizer": "transformers.AutoTokenizer",
        "text_encoder": "transformers.Mistral3Model",
        "transformer": "diffusers.ErnieImageTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    latent_method = "autoencoder-kl-flux2 patched normalised by ernie, 1"
    text_method = "mistral3 penultimate unpadded, 1"
    guidance_scale = 4.0

    @property
    def variance_floor(self) -> float:
        """The pipeline's own."""
        return _VARIANCE_FLOOR

    def token_limits(self) -> dict[str, int]:
        """What its tokenizer takes, and no more than 2048."""
        return {"tokenizer": min(self.tokenizer_limit("tokenizer"), _TOKENS)}

    def load_text_encoders(self, dtype: str, device: str) -> Any:
        """The pipeline, whose tokenizer cuts captions at the limit."""
        pipeline = super().load_text_encoders(dtype, device)
        pipeline.tokenizer.model_max_length = self.max_length()
        return pipeline

    def modelspec_architecture(self) -> str:
        """The one name."""
        return "ernie-image"

    def lora_targets(self) -> list[str]:
        """Attention and feed-forward layers of all blocks."""
        attention = [f"self_attention.{end}" for end in ("to_q", "to_k", "to_v", "to_out.0")]
        return [*attention, "mlp.gate_proj", "mlp.up_proj", "mlp.linear_fc2"]

    def kohya_loads(self) -> bool:
        """Diffusers reads no kohya files for ERNIE-Image."""
        return False

    def comfyui_key(self, module: str) -> str:
        """`diffusion_model.` and diffusers' path: ComfyUI's model has the same names."""
        return f"diffusion_model.{module}"

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`ErnieImagePipeline.encode_prompt`."""
        states = encoders.encode_prompt(caption, encoders.text_encoder.device)
        return {"text_embedding": states[0][None]}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample."""
        return denoiser(
            hidden_states=noisy,
            timestep=timesteps,
            text_bth=conditions["text_embedding"],
            text_lens=conditions["text_mask"].sum(dim=1).long(),
            return_dict=False,
        )[0]

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption."""
        return {
            f"{sign}prompt_embeds": unpadded(tensors["text_embedding"], tensors["text_mask"])
            for sign, tensors in (("", text), ("negative_", empty_text))
        }
