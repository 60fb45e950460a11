"""Checkpoints of UNet models with the module names of their original code, from a diffusers folder.

The names are taken from the original repositories and not from diffusers' conversion, so that the conversion
is tested against an independent inverse.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tests.pipeline.models.convert.state_dicts import (
    State,
    config,
    fuse,
    rename,
    replace_all,
    weights,
    with_prefix,
)

_RESIDUAL = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_UNET_ENDS = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}


def unet(folder: Path) -> State:
    """Return the weights of the UNet in CompVis's and Stability AI's layout."""
    layers = config(folder)["layers_per_block"]
    state = weights(folder)
    up_with_attention = {
        int(name.split(".")[1]) for name in state if re.match(r"up_blocks\.\d+\.attentions", name)
    }

    def name_of(name: str) -> str:
        if match := re.fullmatch(r"(down|up)_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.+)", name):
            way, level, kind, layer, rest = match.groups()
            number = int(level) * (layers + 1) + int(layer)
            block = f"input_blocks.{number + 1}" if way == "down" else f"output_blocks.{number}"
            return f"{block}.0.{rename(rest, _RESIDUAL)}" if kind == "resnets" else f"{block}.1.{rest}"
        if match := re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)", name):
            kind, number, rest = match.groups()
            if kind == "attentions":
                return f"middle_block.1.{rest}"
            return f"middle_block.{2 * int(number)}.{rename(rest, _RESIDUAL)}"
        if match := re.fullmatch(r"down_blocks\.(\d+)\.downsamplers\.0\.conv\.(.+)", name):
            return f"input_blocks.{(int(match[1]) + 1) * (layers + 1)}.0.op.{match[2]}"
        if match := re.fullmatch(r"up_blocks\.(\d+)\.upsamplers\.0\.conv\.(.+)", name):
            level = int(match[1])
            member = 2 if level in up_with_attention else 1
            return f"output_blocks.{level * (layers + 1) + layers}.{member}.conv.{match[2]}"
        return rename(name, _UNET_ENDS)

    return {name_of(name): tensor for name, tensor in state.items()}


def vae(folder: Path) -> State:
    """Return the weights of CompVis's autoencoder, in which attention uses 1x1 convolutions."""
    state = weights(folder)
    levels = len(config(folder)["block_out_channels"])

    def name_of(name: str) -> str:
        def level(match: re.Match[str]) -> int:  # the original counts from the other end
            return levels - 1 - int(match[1])

        old = re.sub(r"down_blocks\.(\d+)\.resnets\.", r"down.\1.block.", name)
        old = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", old)
        old = re.sub(r"up_blocks\.(\d+)\.resnets", lambda match: f"up.{level(match)}.block", old)
        old = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda match: f"up.{level(match)}.upsample", old)
        old = re.sub(r"mid_block\.resnets\.(\d)", lambda match: f"mid.block_{int(match[1]) + 1}", old)
        old = old.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        if "mid_block.attentions.0" in old:
            old = old.replace("mid_block.attentions.0", "mid.attn_1").replace("to_out.0", "proj_out")
            old = re.sub(r"to_([qkv])\.", r"\1.", old).replace("group_norm", "norm")
        return old

    return {
        name_of(name): tensor[:, :, None, None] if "attentions" in name and tensor.ndim == 2 else tensor
        for name, tensor in state.items()
    }


def clip(folder: Path) -> State:
    """Return the weights of transformers' CLIP below `text_model`, as in published files."""
    state = weights(folder)
    return {
        name if name.startswith(("text_model.", "text_projection.")) else f"text_model.{name}": tensor
        for name, tensor in state.items()
    }


def open_clip(folder: Path) -> State:
    """Return OpenCLIP's text model: fused query, key and value, and the projection as a plain parameter."""
    state = {name.removeprefix("text_model."): tensor for name, tensor in clip(folder).items()}
    layers = {name.split(".")[2] for name in state if name.startswith("encoder.layers.")}
    for layer in layers:
        attention = f"encoder.layers.{layer}.self_attn"
        fuse(state, [f"{attention}.{each}_proj" for each in "qkv"], f"{attention}.in_proj")
    pairs = {
        "encoder.layers.": "transformer.resblocks.",
        "self_attn.in_proj.": "attn.in_proj_",
        "self_attn": "attn",
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
        "final_layer_norm": "ln_final",
        "embeddings.token_embedding": "token_embedding",
        "embeddings.position_embedding.weight": "positional_embedding",
    }
    originals = {replace_all(name, pairs): tensor for name, tensor in state.items()}
    if "text_projection.weight" in originals:
        originals["text_projection"] = originals.pop("text_projection.weight").T
    return originals


def stable_diffusion(folder: Path) -> State:
    """Return a checkpoint of Stable Diffusion 1.x."""
    return {
        **with_prefix("model.diffusion_model.", unet(folder / "unet")),
        **with_prefix("first_stage_model.", vae(folder / "vae")),
        **with_prefix("cond_stage_model.transformer.", clip(folder / "text_encoder")),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(77)[None],
        "alphas_cumprod": torch.linspace(1, 0, 1000),
    }


def stable_diffusion_2(folder: Path) -> State:
    """Return a checkpoint of Stable Diffusion 2.x, which uses OpenCLIP's text encoder."""
    return {
        **with_prefix("model.diffusion_model.", unet(folder / "unet")),
        **with_prefix("first_stage_model.", vae(folder / "vae")),
        **with_prefix("cond_stage_model.model.", open_clip(folder / "text_encoder")),
    }


def stable_diffusion_xl(folder: Path) -> State:
    return {
        **with_prefix("model.diffusion_model.", unet(folder / "unet")),
        **with_prefix("first_stage_model.", vae(folder / "vae")),
        **with_prefix("conditioner.embedders.0.transformer.", clip(folder / "text_encoder")),
        **with_prefix("conditioner.embedders.1.model.", open_clip(folder / "text_encoder_2")),
    }
