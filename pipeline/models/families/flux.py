"""FLUX.1 dev and schnell: T5 and a pooled CLIP, a transformer over packed latents, a VAE of 16 channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.models.families.base import Conditions, Layer, Shapes
from pipeline.models.families.flow_transformer import FlowTransformer
from pipeline.models.families.flux_blocks import (
    CONVERTED_WIDTH,
    PATCH,
    block_targets,
    kohya_block_layer,
    packed,
    text_ids,
    unpacked,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

_TRAINING_GUIDANCE = 1.0
"""Told to dev's transformer, whose guidance is distilled: at 1 the adapter learns no guidance of its own."""


class Flux(FlowTransformer):
    """FLUX.1 dev and schnell: dev's transformer takes a guidance, and its shift depends on the size."""

    name = "FLUX.1"
    pipeline_classes = ("FluxPipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.CLIPTokenizer",
        "tokenizer_2": "transformers.T5TokenizerFast",
        "text_encoder": "transformers.CLIPTextModel",
        "text_encoder_2": "transformers.T5EncoderModel",
        "transformer": "diffusers.FluxTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    latent_method = "autoencoder-kl shifted scaled, 1"
    text_method = "t5 padded and clip pooled, 1"
    guidance_scale = 3.5

    def size_multiple(self) -> int:
        """The VAE's factor times the edge of what is packed into a token: 16."""
        return self.factor * PATCH

    @property
    def guided(self) -> bool:
        """Whether the transformer takes a guidance: dev does, schnell does not."""
        return bool(self.denoiser_config.get("guidance_embeds"))

    def token_limits(self) -> dict[str, int]:
        """T5's alone, CLIP says little: the pipeline's 512, and the 256 that schnell was made for."""
        return {"tokenizer_2": 512 if self.guided else 256}

    def text_shapes(self) -> Shapes:
        """T5's hidden states, padded to T, and CLIP's pooled output."""
        return {
            "text_embedding": (self.max_length(), int(self.config("text_encoder_2")["d_model"])),
            "pooled_text_embedding": (int(self.config("text_encoder")["hidden_size"]),),
        }

    def modelspec_architecture(self) -> str:
        """By whether it takes a guidance."""
        return f"flux-1-{'dev' if self.guided else 'schnell'}"

    def lora_targets(self) -> list[str]:
        """Every linear layer of both kinds of block but the modulations."""
        return block_targets(int(self.denoiser_config["num_single_layers"]))

    def kohya_layer(self, module: str) -> Layer:
        """As `kohya_block_layer`."""
        return kohya_block_layer(module, str(self.folder / "transformer" / "config.json"))

    def kohya_loads(self) -> bool:
        """Diffusers' loader knows the published width alone."""
        config = self.denoiser_config
        return int(config["num_attention_heads"]) * int(config["attention_head_dim"]) == CONVERTED_WIDTH

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`FluxPipeline.encode_prompt`."""
        embedding, pooled, _ = encoders.encode_prompt(
            caption, device=encoders.text_encoder.device, max_sequence_length=self.max_length()
        )
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample, of tokens that the pipeline's own functions pack, number and unpack."""
        import torch

        pipeline = self.pipeline_class()
        text = conditions["text_embedding"]
        guidance = torch.full((len(noisy),), _TRAINING_GUIDANCE, device=noisy.device) if self.guided else None
        tokens = denoiser(
            **packed(pipeline, noisy),
            timestep=timesteps / self.num_timesteps,
            guidance=guidance,
            pooled_projections=conditions["pooled_text_embedding"],
            encoder_hidden_states=text,
            txt_ids=text_ids(text),
            return_dict=False,
        )[0]
        return unpacked(pipeline, tokens, noisy, self.factor)

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """The caption alone: guidance is distilled."""
        return {
            "prompt_embeds": text["text_embedding"],
            "pooled_prompt_embeds": text["pooled_text_embedding"],
        }
