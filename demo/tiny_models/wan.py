"""A tiny Wan 2.1 for text-to-video, with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import umt5
from demo.tiny_models.parts import assemble, flow_solver, num_t5_tokens, write_t5_tokenizer

_TEXT_WIDTH = 32
_CHANNELS = 16
_MEAN_GAIN = 8.0
_LOGVAR_BIAS = -8.0


def make_tiny_wan(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `WanPipeline.from_pretrained(folder)` loads it, and it draws videos of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "WanPipeline",
        {
            "vae": _vae,
            "transformer": _transformer,
            "text_encoder": partial(umt5, width=_TEXT_WIDTH, num_tokens=num_t5_tokens()),
            "scheduler": partial(flow_solver, "UniPCMultistepScheduler"),
        },
        tokenizers={"tokenizer": write_t5_tokenizer},
        seed=seed,
        index={"boundary_ratio": None, "expand_timesteps": False, "transformer_2": [None, None]},
    )


def _vae() -> Any:
    """Return an `AutoencoderKLWan` with 16 channels and factor 8."""
    import torch
    from diffusers import AutoencoderKLWan

    made: Any = AutoencoderKLWan(base_dim=8, num_res_blocks=1)
    with torch.no_grad():
        made.quant_conv.weight[:_CHANNELS] *= _MEAN_GAIN
        made.quant_conv.bias[_CHANNELS:] = _LOGVAR_BIAS
    return made


def _transformer() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        text_dim=_TEXT_WIDTH,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
    )
