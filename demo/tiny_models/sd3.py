"""A Stable Diffusion 3 with about a million random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.parts import (
    assemble,
    clip,
    flow_schedule,
    t5,
    vae,
    write_clip_tokenizer,
    write_t5_tokenizer,
)

_PROJECTIONS = (24, 40)
_WIDTHS = (32, 48)
_T5_WIDTH = 96
"""Width of the text embedding; as in the real model, both CLIPs together are narrower and get padded."""


def make_tiny_sd3(
    folder: Path, *, t5_encoder: bool = True, dual_attention: bool = False, seed: int = 0
) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `StableDiffusion3Pipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        t5_encoder: Whether to write the third text encoder.
        dual_attention: Whether the first block has two attentions with normed queries and keys, as in
            SD 3.5 medium.
        seed: Seed of the random weights.
    """
    with_projection = "CLIPTextModelWithProjection"
    networks: dict[str, Any] = {
        "scheduler": partial(flow_schedule, shift=3.0),
        "vae": partial(vae, channels=16, scaling_factor=1.5305, shift_factor=0.0609, quant=False),
        "transformer": partial(_transformer, dual_attention),
        "text_encoder": partial(clip, with_projection, width=_WIDTHS[0], projection=_PROJECTIONS[0]),
        "text_encoder_2": partial(
            clip, with_projection, width=_WIDTHS[1], layers=3, projection=_PROJECTIONS[1], hidden_act="gelu"
        ),
    }
    tokenizers: dict[str, Callable[[Path], str]] = {
        "tokenizer": write_clip_tokenizer,
        "tokenizer_2": write_clip_tokenizer,
    }
    index: dict[str, object] = {"feature_extractor": [None, None], "image_encoder": [None, None]}
    if t5_encoder:
        networks["text_encoder_3"] = partial(t5, width=_T5_WIDTH)
        tokenizers["tokenizer_3"] = write_t5_tokenizer
    else:
        index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    assemble(
        folder,
        "StableDiffusion3Pipeline",
        networks,
        tokenizers=tokenizers,
        seed=seed,
        index=index,
    )


def _transformer(dual_attention: bool) -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=_T5_WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=sum(_PROJECTIONS),
        pos_embed_max_size=12,
        dual_attention_layers=(0,) if dual_attention else (),
        qk_norm="rms_norm" if dual_attention else None,
    )
