"""A tiny Sana with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import gemma2, write_gemma_tokenizer
from demo.tiny_models.parts import assemble, flow_solver

_TEXT_WIDTH = 48
_CHANNELS = 32
_GAIN = 8.0
"""Factor for the autoencoder's last layer: an untrained one returns almost zero."""


def make_tiny_sana(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `SanaPipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "SanaPipeline",
        {
            "vae": _autoencoder,
            "transformer": _transformer,
            "text_encoder": partial(gemma2, width=_TEXT_WIDTH),
            "scheduler": partial(flow_solver, "DPMSolverMultistepScheduler"),
        },
        tokenizers={"tokenizer": write_gemma_tokenizer},
        seed=seed,
    )


def _autoencoder() -> Any:
    import torch
    from diffusers import AutoencoderDC

    levels: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        levels[f"{side}_block_out_channels"] = (8, 8, 8, 8, 16, 16)
        levels[f"{side}_layers_per_block"] = (1,) * 6
        levels[f"{side}_qkv_multiscales"] = ((), (), (), (), (), (5,))
        levels[f"{side}_block_types"] = (*("ResBlock",) * 5, "EfficientViTBlock")
    made: Any = AutoencoderDC(
        latent_channels=_CHANNELS,
        attention_head_dim=8,
        downsample_block_type="Conv",
        upsample_block_type="interpolate",
        decoder_act_fns="silu",
        encoder_out_shortcut=False,
        decoder_in_shortcut=False,
        scaling_factor=0.41407,
        **levels,
    )
    with torch.no_grad():
        made.encoder.conv_out.weight *= _GAIN
    return made


def _transformer() -> Any:
    from diffusers import SanaTransformer2DModel

    return SanaTransformer2DModel(
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=_TEXT_WIDTH,
    )
