"""The transformer of FLUX.2, klein and dev: its blocks' names, its shift, its tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pipeline.errors import FamilyError
from pipeline.models.families.base import Layer
from pipeline.models.families.flow_transformer import stacked
from pipeline.models.families.flux2_latents import Flux2Latents

if TYPE_CHECKING:
    from torch import Tensor, nn

TOKENS = 512
"""`max_sequence_length` of the pipelines, template included."""

_NUM_ENCODER_LAYERS = 3
"""Hidden states of which `encode_prompt` takes side by side."""

_DRAWING_STEPS = 50
"""Of the pipelines by default: the shift depends on it."""

_BLOCK = re.compile(r"(single_)?transformer_blocks\.(\d+)\.(.+)")
_DOUBLE = {
    "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "img_attn_proj": ("attn.to_out.0",),
    "img_mlp_0": ("ff.linear_in",),
    "img_mlp_2": ("ff.linear_out",),
    "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "txt_attn_proj": ("attn.to_add_out",),
    "txt_mlp_0": ("ff_context.linear_in",),
    "txt_mlp_2": ("ff_context.linear_out",),
}
_SINGLE = {"linear1": ("attn.to_qkv_mlp_proj",), "linear2": ("attn.to_out",)}
"""Layers of Black Forest Labs' blocks to diffusers' modules."""


class Flux2Blocks(Flux2Latents):
    """FLUX.2, whichever language model tells it what to draw; it sees what that makes of padding."""

    text_padding = "stored"

    def text_width(self) -> int:
        """Of the hidden states of three layers side by side."""
        return _NUM_ENCODER_LAYERS * super().text_width()

    def lora_targets(self) -> list[str]:
        """Every linear layer of both kinds of block."""
        double = [module for modules in _DOUBLE.values() for module in modules]
        blocks = range(int(self.denoiser_config["num_single_layers"]))
        outs = [f"single_transformer_blocks.{block}.attn.to_out" for block in blocks]
        return [*double, "attn.to_qkv_mlp_proj", *outs]

    def kohya_layer(self, module: str) -> Layer:
        """`lora_unet_` and Black Forest Labs' layer: in double blocks query, key and value are one."""
        found = _BLOCK.fullmatch(module)
        layer = stacked(_SINGLE if found[1] else _DOUBLE, found[3]) if found else None
        if not found or not layer:
            raise FamilyError(
                f"the module {module} has no name in kohya's layout",
                where=str(self.folder / "transformer" / "config.json"),
                fix="adapt linear layers of transformer blocks only",
            )
        block = module.removesuffix(found[3])
        kind = "single" if found[1] else "double"
        modules = tuple(f"{block}{name}" for name in layer[1])
        return Layer(f"lora_unet_{kind}_blocks_{found[2]}_{layer[0]}", modules)

    def size_shift(self, scheduler: Any, latent_shape: tuple[int, int, int]) -> float:
        """As the pipeline computes it for its usual number of steps."""
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        return compute_empirical_mu(self.num_tokens(latent_shape), _DRAWING_STEPS)

    def sample(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, text: Tensor, *, guidance: Tensor | None
    ) -> Tensor:
        """The transformer's sample, of tokens that the pipeline's own functions pack and number."""
        pipeline = self.pipeline_class()
        tokens = denoiser(
            hidden_states=pipeline._pack_latents(noisy),
            timestep=timesteps / self.num_timesteps,
            guidance=guidance,
            encoder_hidden_states=text,
            txt_ids=pipeline._prepare_text_ids(text).to(noisy.device),
            img_ids=pipeline._prepare_latent_ids(noisy).to(noisy.device),
            return_dict=False,
        )[0]
        return tokens.transpose(1, 2).reshape(noisy.shape)  # tokens are the latent's values, row by row
