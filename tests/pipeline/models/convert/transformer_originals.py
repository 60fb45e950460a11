"""Transformers with the module names of their original code, from a diffusers folder.

The names are taken from the original repositories; see `unet_originals`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.pipeline.models.convert.state_dicts import (
    State,
    fuse,
    rename,
    replace_all,
    shift_before_scale,
    weights,
    with_prefix,
)
from tests.pipeline.models.convert.unet_originals import clip, vae


def sd3_transformer(folder: Path) -> State:
    """Return the weights of Stability AI's MMDiT."""
    state = weights(folder)
    blocks = {name.split(".")[1] for name in state if name.startswith("transformer_blocks.")}
    last = max(blocks, key=int)
    for block in blocks:
        ours = f"transformer_blocks.{block}"
        for fused_name, parts in {
            "x_block.attn": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "x_block.attn2": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
            "context_block.attn": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        }.items():
            fuse(state, [f"{ours}.{part}" for part in parts], f"joint_blocks.{block}.{fused_name}.qkv")
    for name in (f"transformer_blocks.{last}.norm1_context.linear", "norm_out.linear"):
        for kind in ("weight", "bias"):
            state[f"{name}.{kind}"] = shift_before_scale(state[f"{name}.{kind}"])
    pairs = {
        "transformer_blocks.": "joint_blocks.",
        "attn.norm_added_q": "context_block.attn.ln_q",
        "attn.norm_added_k": "context_block.attn.ln_k",
        "attn.to_add_out": "context_block.attn.proj",
        ".attn.norm_q": ".x_block.attn.ln_q",
        ".attn.norm_k": ".x_block.attn.ln_k",
        ".attn.to_out.0": ".x_block.attn.proj",
        ".attn2.norm_q": ".x_block.attn2.ln_q",
        ".attn2.norm_k": ".x_block.attn2.ln_k",
        ".attn2.to_out.0": ".x_block.attn2.proj",
        "norm1_context.linear": "context_block.adaLN_modulation.1",
        "norm1.linear": "x_block.adaLN_modulation.1",
        "ff_context.net.0.proj": "context_block.mlp.fc1",
        "ff_context.net.2": "context_block.mlp.fc2",
        "ff.net.0.proj": "x_block.mlp.fc1",
        "ff.net.2": "x_block.mlp.fc2",
    }
    ends = {
        "pos_embed.proj": "x_embedder.proj",
        "pos_embed": "",
        "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
        "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
        "proj_out": "final_layer.linear",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
    }
    return {replace_all(rename(name, ends).lstrip("."), pairs): tensor for name, tensor in state.items()}


def stable_diffusion_3(folder: Path) -> State:
    """Return a checkpoint with all components of 3 medium, T5 included."""
    first = clip(folder / "text_encoder")
    first.pop("text_projection.weight")  # original files do not contain it
    return {
        **with_prefix("model.diffusion_model.", sd3_transformer(folder / "transformer")),
        **with_prefix("first_stage_model.", vae(folder / "vae")),
        **with_prefix("text_encoders.clip_l.transformer.", first),
        **with_prefix("text_encoders.clip_g.transformer.", clip(folder / "text_encoder_2")),
        **with_prefix("text_encoders.t5xxl.transformer.", weights(folder / "text_encoder_3")),
    }


_FLUX_BLOCKS = {
    "single_transformer_blocks.": "single_blocks.",
    "transformer_blocks.": "double_blocks.",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    "attn.to_add_out": "txt_attn.proj",
    "norm1_context.linear": "txt_mod.lin",
    "norm1.linear": "img_mod.lin",
    "norm.linear": "modulation.lin",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
}
_FLUX_ENDS = {
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_guidance_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "context_embedder": "txt_in",
    "x_embedder": "img_in",
    "proj_out": "final_layer.linear",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
}


def flux(folder: Path) -> State:
    """Return the weights of FLUX.1, FLUX.2 or Chroma in Black Forest Labs' layout."""
    state = weights(folder)
    for name in [name for name in state if name.startswith("norm_out.linear.")]:
        state[name] = shift_before_scale(state[name])
    originals: State = {}
    doubles = {name.split(".")[1] for name in state if name.startswith("transformer_blocks.")}
    singles = {name.split(".")[1] for name in state if name.startswith("single_transformer_blocks.")}
    for block in doubles:
        ours, theirs = f"transformer_blocks.{block}.attn", f"double_blocks.{block}"
        fuse(state, [f"{ours}.to_{each}" for each in "qkv"], f"{theirs}.img_attn.qkv")
        fuse(state, [f"{ours}.add_{each}_proj" for each in "qkv"], f"{theirs}.txt_attn.qkv")
    for block in singles:
        ours, theirs = f"single_transformer_blocks.{block}", f"single_blocks.{block}"
        if f"{ours}.proj_mlp.weight" in state:
            parts = [f"{ours}.attn.to_{each}" for each in "qkv"]
            fuse(state, [*parts, f"{ours}.proj_mlp"], f"{theirs}.linear1")
    for name, tensor in state.items():
        single = name.startswith("single_transformer_blocks.")
        pairs = {
            "attn.to_qkv_mlp_proj": "linear1",
            "attn.to_out.0": "img_attn.proj",
            "attn.to_out": "linear2",
            **({"proj_out": "linear2"} if single else {}),
            "attn.norm_q.weight": "norm.query_norm.scale" if single else "img_attn.norm.query_norm.scale",
            "attn.norm_k.weight": "norm.key_norm.scale" if single else "img_attn.norm.key_norm.scale",
            **_FLUX_BLOCKS,
        }
        inside = "transformer_blocks." in name
        originals[replace_all(name, pairs) if inside else rename(name, _FLUX_ENDS)] = tensor
    pairs = {"linear_1": "in_layer", "linear_2": "out_layer"}
    pairs |= {f"norms.{number}.weight": f"norms.{number}.scale" for number in range(5)}
    return {
        replace_all(name, pairs) if name.startswith("distilled_guidance_layer.") else name: tensor
        for name, tensor in originals.items()
    }


def z_image(folder: Path) -> State:
    """Return the weights of Z-Image in ComfyUI's layout, with fused query, key and value."""
    state = weights(folder)
    for block in {name.split(".attention.")[0] for name in state if ".attention.to_q." in name}:
        ours = f"{block}.attention"
        fuse(state, [f"{ours}.to_{each}" for each in "qkv"], f"{ours}.qkv")
    pairs = {
        "all_final_layer.2-1.": "final_layer.",
        "all_x_embedder.2-1.": "x_embedder.",
        ".attention.to_out.0.": ".attention.out.",
        ".attention.norm_k.": ".attention.k_norm.",
        ".attention.norm_q.": ".attention.q_norm.",
    }
    return {replace_all(name, pairs): tensor for name, tensor in state.items()}


def lumina2(folder: Path) -> State:
    """Return the weights of Alpha-VLLM's Lumina 2, including its unused final norm."""
    state = weights(folder)
    for block in {name.split(".attn.")[0] for name in state if ".attn.to_q." in name}:
        fuse(state, [f"{block}.attn.to_{each}" for each in "qkv"], f"{block}.attention.qkv")
    pairs = {
        "time_caption_embed.caption_embedder": "cap_embedder",
        "time_caption_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_caption_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "norm_out.linear_1": "final_layer.adaLN_modulation.1",
        "norm_out.linear_2": "final_layer.linear",
        ".attn.to_out.0": ".attention.out",
        ".attn.norm_q": ".attention.q_norm",
        ".attn.norm_k": ".attention.k_norm",
        "norm1.linear": "adaLN_modulation.1",
        ".norm1.norm": ".attention_norm1",
        "ffn_norm1": "ffn_norm-one",
        "ffn_norm2": "ffn_norm-two",
        ".norm1": ".attention_norm1",
        ".norm2": ".attention_norm2",
        "ffn_norm-one": "ffn_norm1",
        "ffn_norm-two": "ffn_norm2",
        "feed_forward.linear_": "feed_forward.w",
    }
    originals = {replace_all(name, pairs): tensor for name, tensor in state.items()}
    return {**originals, "norm_final.weight": torch.ones(4)}


def sana(folder: Path) -> State:
    """Return the weights of NVIDIA's Sana, with the empty caption and the positions that diffusers omits."""
    state = weights(folder)
    for block in {name.split(".")[1] for name in state if name.startswith("transformer_blocks.")}:
        ours, theirs = f"transformer_blocks.{block}", f"blocks.{block}"
        fuse(state, [f"{ours}.attn1.to_{each}" for each in "qkv"], f"{theirs}.attn.qkv")
        fuse(state, [f"{ours}.attn2.to_{each}" for each in "kv"], f"{theirs}.cross_attn.kv_linear")
    ends = {
        "patch_embed.proj": "x_embedder.proj",
        "time_embed.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_embed.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "time_embed.linear": "t_block.1",
        "caption_projection.linear_1": "y_embedder.y_proj.fc1",
        "caption_projection.linear_2": "y_embedder.y_proj.fc2",
        "caption_norm": "attention_y_norm",
        "proj_out": "final_layer.linear",
    }
    pairs = {
        "transformer_blocks.": "blocks.",
        "attn1.to_out.0": "attn.proj",
        "attn2.to_q": "cross_attn.q_linear",
        "attn2.to_out.0": "cross_attn.proj",
        "ff.conv_inverted": "mlp.inverted_conv.conv",
        "ff.conv_depth": "mlp.depth_conv.conv",
        "ff.conv_point": "mlp.point_conv.conv",
    }
    originals = {replace_all(rename(name, ends), pairs): tensor for name, tensor in state.items()}
    originals["final_layer.scale_shift_table"] = originals.pop("scale_shift_table")
    return {**originals, "pos_embed": torch.zeros(1, 4, 32), "y_embedder.y_embedding": torch.zeros(300, 48)}


def aura_flow(folder: Path) -> State:
    """Return the weights of Fal's AuraFlow."""
    state = weights(folder)
    state["norm_out.linear.weight"] = shift_before_scale(state["norm_out.linear.weight"])
    ends = {
        "time_step_proj.linear_1": "t_embedder.mlp.0",
        "time_step_proj.linear_2": "t_embedder.mlp.2",
        "context_embedder": "cond_seq_linear",
        "norm_out.linear": "modF.1",
        "proj_out": "final_linear",
        "pos_embed.proj": "init_x_linear",
    }
    feed = {"linear_1": "c_fc1", "linear_2": "c_fc2", "out_projection": "c_proj"}
    double = {
        "joint_transformer_blocks.": "double_layers.",
        "ff_context.": "mlpC.",
        "ff.": "mlpX.",
        "norm1_context.linear": "modC.1",
        "norm1.linear": "modX.1",
        **{f"attn.to_{each}.": f"attn.w2{each}." for each in "qkv"},
        **{f"attn.add_{each}_proj.": f"attn.w1{each}." for each in "qkv"},
        "attn.to_out.0": "attn.w2o",
        "attn.to_add_out": "attn.w1o",
    }
    single = {
        "single_transformer_blocks.": "single_layers.",
        "ff.": "mlp.",
        "norm1.linear": "modCX.1",
        **{f"attn.to_{each}.": f"attn.w1{each}." for each in "qkv"},
        "attn.to_out.0": "attn.w1o",
    }
    originals: State = {}
    for name, tensor in state.items():
        if "transformer_blocks." in name:
            pairs = double if name.startswith("joint_") else single
            originals[replace_all(replace_all(name, pairs), feed)] = tensor
        else:
            originals[rename(name, ends)] = tensor
    originals["positional_encoding"] = originals.pop("pos_embed.pos_embed")
    return originals


def krea2(folder: Path) -> State:
    """Return the weights of Krea 2, with the six modulations of a block in one row."""
    ends = {
        "img_in": "first",
        "time_embed.linear_1": "tmlp.0",
        "time_embed.linear_2": "tmlp.2",
        "time_mod_proj": "tproj.1",
        "txt_in.linear_1": "txtmlp.1",
        "txt_in.linear_2": "txtmlp.3",
        "final_layer.linear": "last.linear",
    }
    pairs = {
        "txt_in.norm.weight": "txtmlp.0.scale",
        "final_layer.norm.weight": "last.norm.scale",
        "final_layer.scale_shift_table": "last.modulation.lin",
        "text_fusion.": "txtfusion.",
        "transformer_blocks.": "blocks.",
        **{f".attn.to_{each}.": f".attn.w{each}." for each in "qkv"},
        ".attn.to_out.0.": ".attn.wo.",
        ".attn.to_gate.": ".attn.gate.",
        ".attn.norm_q.weight": ".attn.qknorm.qnorm.scale",
        ".attn.norm_k.weight": ".attn.qknorm.knorm.scale",
        ".ff.": ".mlp.",
        ".norm1.weight": ".prenorm.scale",
        ".norm2.weight": ".postnorm.scale",
        ".scale_shift_table": ".mod.lin",
    }
    return {
        replace_all(rename(name, ends), pairs): tensor.flatten() if tensor.shape[:1] == (6,) else tensor
        for name, tensor in weights(folder).items()
    }


def ideogram4(folder: Path) -> State:
    """Return the weights of Ideogram 4 with the stacked layers of its own code."""
    state = weights(folder)
    for block in {name.split(".attention.")[0] for name in state if ".attention.to_q." in name}:
        fuse(state, [f"{block}.attention.to_{each}" for each in "qkv"], f"{block}.attention.qkv")
    return {replace_all(name, {".to_out.0": ".o"}): tensor for name, tensor in state.items()}


def qwen_image21(folder: Path) -> State:
    """Return the weights of Qwen-Image 2.1 as ComfyUI stores them, with the MLP's gate and input stacked."""
    state = weights(folder)
    for block in {name.split(".img_mlp.")[0] for name in state if ".img_mlp." in name}:
        fuse(state, [f"{block}.img_mlp.gate_layer", f"{block}.img_mlp.proj"], f"{block}.img_mlp.gate_up")
    return state


def anima(folder: Path) -> State:
    """Return the weights of Anima's transformer in CircleStone Labs' layout, without the text conditioner.

    The text conditioner has the names of diffusers after `llm_adapter.`.
    """
    pairs = {
        "transformer_blocks.": "blocks.",
        "attn1.": "self_attn.",
        "attn2.": "cross_attn.",
        "to_out.0": "output_proj",
        ".to_q": ".q_proj",
        ".to_k": ".k_proj",
        ".to_v": ".v_proj",
        ".norm_q": ".q_norm",
        ".norm_k": ".k_norm",
        ".norm1.linear_": ".adaln_modulation_self_attn.",
        ".norm2.linear_": ".adaln_modulation_cross_attn.",
        ".norm3.linear_": ".adaln_modulation_mlp.",
        "ff.net.0.proj": "mlp.layer1",
        "ff.net.2": "mlp.layer2",
        "norm_out.linear_": "final_layer.adaln_modulation.",
        "time_embed.t_embedder": "t_embedder.1",
        "time_embed.norm": "t_embedding_norm",
        "patch_embed.proj": "x_embedder.proj.1",
    }
    state = {rename(name, {"proj_out": "final_layer.linear"}): each for name, each in weights(folder).items()}
    return {replace_all(name, pairs): tensor for name, tensor in state.items()}


def wan(folder: Path) -> State:
    """Return the weights of Wan's transformer in Alibaba's layout."""
    ends = {
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "condition_embedder.time_proj": "time_projection.1",
        "proj_out": "head.head",
    }
    pairs = {
        "attn1.": "self_attn.",
        "attn2.": "cross_attn.",
        ".to_out.0": ".o",
        **{f".to_{each}": f".{each}" for each in "qkv"},
        "ffn.net.0.proj": "ffn.0",
        "ffn.net.2": "ffn.2",
        ".norm2.": ".norm3.",
        ".scale_shift_table": ".modulation",
    }
    state = {replace_all(rename(name, ends), pairs): tensor for name, tensor in weights(folder).items()}
    state["head.modulation"] = state.pop("scale_shift_table")
    return state


TRANSFORMERS: dict[str, Callable[[Path], State]] = {
    "FLUX.2 klein": flux,
    "FLUX.2 dev": flux,
    "Qwen-Image": weights,
    "Qwen-Image 2.1": qwen_image21,
    "Z-Image": z_image,
    "Sana": sana,
    "AuraFlow": aura_flow,
    "HiDream": weights,
    "ERNIE-Image": weights,
    "Krea 2": krea2,
    "Wan 2.1 (image)": wan,
}
"""Function that returns the original weights, for each kind that diffusers converts at any width."""
