"""FLUX.1 dev and schnell: T5 and a pooled CLIP, a transformer over packed latents, a VAE of 16 channels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.errors import FamilyError
from pipeline.families.base import Conditions, Layer, Shapes
from pipeline.families.flow_transformer import FlowTransformer, stacked

if TYPE_CHECKING:
    from torch import Tensor, nn

_PATCH = 2
"""Edge, in latent values, of what is packed into one token."""

_TRAINING_GUIDANCE = 1.0
"""Told to dev's transformer, whose guidance is distilled: at 1 the adapter learns no guidance of its own."""

_CONVERTED_WIDTH = 3072
"""The only width of the transformer for which diffusers reads kohya's single blocks: the published one."""

_BLOCK = re.compile(r"(single_)?transformer_blocks\.(\d+)\.(.+)")
_DOUBLE = {
    "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn_proj": ("attn.to_out.0",),
    "img_mlp_0": ("ff.net.0.proj",),
    "img_mlp_2": ("ff.net.2",),
    "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn_proj": ("attn.to_add_out",),
    "txt_mlp_0": ("ff_context.net.0.proj",),
    "txt_mlp_2": ("ff_context.net.2",),
}
_SINGLE = {
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
}
"""Layers of Black Forest Labs' blocks to diffusers' modules."""


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
        return self.factor * _PATCH

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
        """Every linear layer of both kinds of block but the modulations, and nothing outside."""
        double = [module for modules in _DOUBLE.values() for module in modules]
        blocks = range(int(self.denoiser_config["num_single_layers"]))
        return [*double, "proj_mlp", *(f"{block}.proj_out" for block in blocks)]

    def kohya_layer(self, module: str) -> Layer:
        """`lora_unet_` and Black Forest Labs' layer: query, key and value are one."""
        found = _BLOCK.fullmatch(module)
        layer = stacked(_SINGLE if found[1] else _DOUBLE, found[3]) if found else None
        if not found or not layer:
            raise FamilyError(
                f"the module {module} has no name in kohya's layout",
                where=str(self.folder / "transformer" / "config.json"),
                fix="adapt linear layers of transformer blocks only, not their modulations",
            )
        block = module.removesuffix(found[3])
        kind = "single" if found[1] else "double"
        modules = tuple(f"{block}{name}" for name in layer[1])
        return Layer(f"lora_unet_{kind}_blocks_{found[2]}_{layer[0]}", modules)

    def kohya_loads(self) -> bool:
        """Diffusers' loader knows the published width alone."""
        config = self.denoiser_config
        return int(config["num_attention_heads"]) * int(config["attention_head_dim"]) == _CONVERTED_WIDTH

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
        batch, channels, height, width = noisy.shape
        text = conditions["text_embedding"]
        rows, columns = height // _PATCH, width // _PATCH
        guidance = torch.full((batch,), _TRAINING_GUIDANCE, device=noisy.device) if self.guided else None
        tokens = denoiser(
            hidden_states=pipeline._pack_latents(noisy, batch, channels, height, width),
            timestep=timesteps / self.num_timesteps,
            guidance=guidance,
            pooled_projections=conditions["pooled_text_embedding"],
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3, device=noisy.device),
            img_ids=pipeline._prepare_latent_image_ids(batch, rows, columns, noisy.device, torch.float32),
            return_dict=False,
        )[0]
        return pipeline._unpack_latents(tokens, height * self.factor, width * self.factor, self.factor)

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """The caption alone: guidance is distilled."""
        return {
            "prompt_embeds": text["text_embedding"],
            "pooled_prompt_embeds": text["pooled_text_embedding"],
        }
