"""Transformers after FLUX.1's: latents packed into tokens, position ids, and the names of their blocks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pipeline.errors import FamilyError
from pipeline.models.families.base import Layer

if TYPE_CHECKING:
    from torch import Tensor

PATCH = 2
"""Edge, in latent values, of what is packed into one token."""

CONVERTED_WIDTH = 3072
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


def block_targets(num_single_layers: int) -> list[str]:
    """Endings of every linear layer of both kinds of block but the modulations; nothing outside of blocks."""
    double = [module for modules in _DOUBLE.values() for module in modules]
    return [*double, "proj_mlp", *(f"{block}.proj_out" for block in range(num_single_layers))]


def kohya_block_layer(module: str, where: str) -> Layer:
    """`lora_unet_` and Black Forest Labs' layer: query, key and value are one.

    Raises:
        FamilyError: The module is none of `block_targets`.
    """
    found = _BLOCK.fullmatch(module)
    if found:
        for name, modules in (_SINGLE if found[1] else _DOUBLE).items():
            if found[3] in modules:
                block = module.removesuffix(found[3])
                kind = "single" if found[1] else "double"
                stack = tuple(f"{block}{each}" for each in modules)
                return Layer(f"lora_unet_{kind}_blocks_{found[2]}_{name}", stack)
    raise FamilyError(
        f"the module {module} has no name in kohya's layout",
        where=where,
        fix="adapt linear layers of transformer blocks only, not their modulations",
    )


def packed(pipeline: Any, noisy: Tensor) -> dict[str, Tensor]:
    """`hidden_states` and `img_ids` of a noisy latent (B, C, h, w), by the pipeline class's own functions."""
    import torch

    batch, channels, height, width = noisy.shape
    rows, columns = height // PATCH, width // PATCH
    return {
        "hidden_states": pipeline._pack_latents(noisy, batch, channels, height, width),
        "img_ids": pipeline._prepare_latent_image_ids(batch, rows, columns, noisy.device, torch.float32),
    }


def text_ids(text: Tensor) -> Tensor:
    """Position ids of text tokens (B, T, D): zeros (T, 3), as the pipelines have them."""
    return text.new_zeros(text.shape[1], 3)


def unpacked(pipeline: Any, tokens: Tensor, noisy: Tensor, factor: int) -> Tensor:
    """The tokens in the shape of `noisy`, by the pipeline class's own function."""
    height, width = noisy.shape[2] * factor, noisy.shape[3] * factor
    return pipeline._unpack_latents(tokens, height, width, factor)
