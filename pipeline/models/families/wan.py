"""Wan 2.1: a UMT5, a transformer and a VAE for videos, here of one frame.

A trial: a LoRA is trained on still images, and diffusers loads it into the pipeline that draws videos.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import FamilyError
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import RenamedKeys
from pipeline.models.families.parts.noise import SolverFlowNoise
from pipeline.models.families.parts.text import WITH_FTFY, LanguageModelText
from pipeline.models.families.parts.vae import WanLatents, frame_patch

_ENDS = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}

# Names of a block's layers in the original code, by their diffusers names.
_ADAPTED = {
    **{f"attn1.{name}": f"self_attn.{original}" for name, original in _ENDS.items()},
    **{f"attn2.{name}": f"cross_attn.{original}" for name, original in _ENDS.items()},
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}

# Names of linear layers outside of blocks.
_OUTSIDE = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "proj_out": "head.head",
}


def _require_one_transformer(contents: Mapping[str, Any], index: Path) -> None:
    """Raise FamilyError for Wan 2.2, which has the same pipeline class."""
    # A14B draws the first noise levels with one transformer, and those below `boundary_ratio` with another.
    # TI2V-5B takes a timestep for each token.
    _, second = contents.get("transformer_2") or (None, None)
    if second:
        key, reason = "transformer_2", "has two transformers, each for a part of the noise levels"
    elif contents.get("boundary_ratio") is not None:
        key, reason = "boundary_ratio", "has a transformer for a part of the noise levels only"
    elif contents.get("expand_timesteps"):
        key, reason = "expand_timesteps", "takes a timestep for each token"
    else:
        return
    raise FamilyError(
        f"the base model {reason}, as Wan 2.2 does; only Wan 2.1 can be trained",
        where=f"{index}, {key}",
        fix="set model.base to a text-to-video model of Wan 2.1, such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    )


WAN = FamilySpec(
    name="Wan 2.1 (image)",
    pipeline_classes=("WanPipeline",),
    components={
        "vae": "diffusers.AutoencoderKLWan",
        "tokenizer": "transformers.T5TokenizerFast",
        "text_encoder": "transformers.UMT5EncoderModel",
        "transformer": "diffusers.WanTransformer3DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=WanLatents(
        "autoencoder-kl-wan normalised, 1",
        patch=frame_patch,
        max_patches=lambda model: int(model.config("transformer")["rope_max_seq_len"]),
    ),
    text=LanguageModelText(
        "umt5 cleaned unpadded, 1" + WITH_FTFY,
        "families.wan:WanConditioner",
        padding="zeros",
        tokens=512,
    ),
    noise=SolverFlowNoise(),
    denoiser_call="families.wan:WanCall",
    lora=RenamedKeys(
        list(_ADAPTED),
        diffusers_reads_comfyui=True,
        blocks=("blocks", "blocks"),
        in_blocks=_ADAPTED,
        outside=_OUTSIDE,
    ),
    architecture="wan2.1",
    kohya_version="wan",
    guidance_scale=5.0,
    drawing="families.wan:WanDrawing",
    require_supported=_require_one_transformer,
)
