"""Stable Diffusion 3 and 3.5: two CLIPs and, if the model has it, T5; a transformer; a VAE of 16 channels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.errors import BucketError
from pipeline.images.geometry import Size
from pipeline.models.families.base import Conditions, Layer, Shapes
from pipeline.models.families.flow_transformer import FlowTransformer

if TYPE_CHECKING:
    from torch import Tensor, nn

_T5_TOKENS = 256
"""`max_sequence_length` of the pipeline; they are zeros in a model without T5."""

_BLOCK = re.compile(r"transformer_blocks\.(\d+)\.(.+)")
_ORIGINAL = {
    "x_block_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "x_block_attn_proj": ("attn.to_out.0",),
    "x_block_attn2_qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "x_block_attn2_proj": ("attn2.to_out.0",),
    "x_block_mlp_fc1": ("ff.net.0.proj",),
    "x_block_mlp_fc2": ("ff.net.2",),
    "context_block_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "context_block_attn_proj": ("attn.to_add_out",),
    "context_block_mlp_fc1": ("ff_context.net.0.proj",),
    "context_block_mlp_fc2": ("ff_context.net.2",),
}
"""Layers of Stability AI's MMDiT to diffusers' modules."""


class StableDiffusion3(FlowTransformer):
    """Stable Diffusion 3 medium, 3.5 medium and 3.5 large."""

    name = "Stable Diffusion 3 and 3.5"
    pipeline_classes = ("StableDiffusion3Pipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.CLIPTokenizer",
        "tokenizer_2": "transformers.CLIPTokenizer",
        "tokenizer_3": "transformers.T5TokenizerFast",
        "text_encoder": "transformers.CLIPTextModelWithProjection",
        "text_encoder_2": "transformers.CLIPTextModelWithProjection",
        "text_encoder_3": "transformers.T5EncoderModel",
        "transformer": "diffusers.SD3Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    latent_method = "autoencoder-kl shifted scaled, 1"
    text_method = "two clips penultimate and t5 padded, 1"
    guidance_scale = 7.0

    def latent_shape(self, target: Size) -> tuple[int, int, int]:
        """(C, h, w), each edge divided by the VAE's factor.

        Raises:
            BucketError: An edge is beyond the transformer's table of positions.
        """
        shape = super().latent_shape(target)
        largest = int(self.denoiser_config["pos_embed_max_size"]) * self.size_multiple()
        if max(target) > largest:
            raise BucketError(
                f"a target size of {target.height}x{target.width} is too large for this base model",
                where="buckets.resolution",
                fix=f"lower it, or narrow the aspect ratios: no edge may be longer than {largest} px",
            )
        return shape

    def token_limits(self) -> dict[str, int]:
        """CLIP's 77, and T5's 256 where it is there."""
        limits = {role: self.tokenizer_limit(role) for role in ("tokenizer", "tokenizer_2")}
        return {**limits, "tokenizer_3": _T5_TOKENS} if self.has("text_encoder_3") else limits

    def text_shapes(self) -> Shapes:
        """CLIP's tokens and then T5's, as wide as the transformer takes them; both CLIPs' projections."""
        pooled = sum(int(self.config(role)["projection_dim"]) for role in ("text_encoder", "text_encoder_2"))
        tokens = self.tokenizer_limit("tokenizer") + _T5_TOKENS
        return {
            "text_embedding": (tokens, int(self.denoiser_config["joint_attention_dim"])),
            "pooled_text_embedding": (pooled,),
        }

    def modelspec_architecture(self) -> str:
        """By the transformer: 3.5 norms queries and keys, and 3.5 medium has dual attention."""
        if not self.denoiser_config.get("qk_norm"):
            return "stable-diffusion-v3-medium"
        medium = bool(self.denoiser_config.get("dual_attention_layers"))
        return f"stable-diffusion-3.5-{'medium' if medium else 'large'}"

    def lora_targets(self) -> list[str]:
        """Query, key, value and output of each attention, of image and text."""
        ends = ["to_q", "to_k", "to_v", "to_out.0"]
        joint = ["add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
        return [f"attn.{end}" for end in (*ends, *joint)] + [f"attn2.{end}" for end in ends]

    def kohya_layer(self, module: str) -> Layer:
        """`lora_unet_joint_blocks_` and Stability AI's layer: query, key and value are one."""
        number, layer, modules = self.layer_in_block(module, _BLOCK, _ORIGINAL)
        key = f"lora_unet_joint_blocks_{number}_{layer}"
        return Layer(key, tuple(f"transformer_blocks.{number}.{name}" for name in modules))

    def kohya_loads(self) -> bool:
        """Diffusers reads no kohya files for Stable Diffusion 3."""
        return False

    def load_text_encoders(self, dtype: str, device: str) -> Any:
        """The pipeline; without T5 it asks the transformer's configuration for the width of its zeros."""
        import torch

        pipeline = super().load_text_encoders(dtype, device)
        if not self.has("text_encoder_3"):
            with torch.device("meta"):
                skeleton = self.class_of("transformer").from_config(self.denoiser_config)
            pipeline.register_modules(transformer=skeleton)
        return pipeline

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`StableDiffusion3Pipeline.encode_prompt`."""
        embedding, _, pooled, _ = encoders.encode_prompt(
            caption,
            None,
            None,
            device=encoders.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=_T5_TOKENS,
        )
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample, for both text tensors."""
        return denoiser(
            hidden_states=noisy,
            timestep=timesteps,
            encoder_hidden_states=conditions["text_embedding"],
            pooled_projections=conditions["pooled_text_embedding"],
            return_dict=False,
        )[0]

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption."""
        return {
            "prompt_embeds": text["text_embedding"],
            "pooled_prompt_embeds": text["pooled_text_embedding"],
            "negative_prompt_embeds": empty_text["text_embedding"],
            "negative_pooled_prompt_embeds": empty_text["pooled_text_embedding"],
        }
