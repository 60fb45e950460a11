"""A tiny Qwen-Image with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import qwen2_5_vl, write_qwen_tokenizer
from demo.tiny_models.parts import assemble, flow_schedule

_TEXT_WIDTH = 32
_CHANNELS = 16
_MEAN_GAIN = 8.0
_LOGVAR_BIAS = -8.0


def make_tiny_qwen_image(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `QwenImagePipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "QwenImagePipeline",
        {
            "vae": qwen_vae,
            "transformer": _transformer,
            "text_encoder": partial(qwen2_5_vl, width=_TEXT_WIDTH),
            "scheduler": partial(
                flow_schedule,
                use_dynamic_shifting=True,
                max_shift=0.9,
                max_image_seq_len=8192,
            ),
        },
        tokenizers={"tokenizer": write_qwen_tokenizer},
        seed=seed,
    )


def qwen_vae() -> Any:
    """Return an `AutoencoderKLQwenImage` with 16 channels and factor 8."""
    import torch
    from diffusers import AutoencoderKLQwenImage

    made: Any = AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1)
    with torch.no_grad():
        made.quant_conv.weight[:_CHANNELS] *= _MEAN_GAIN
        made.quant_conv.bias[_CHANNELS:] = _LOGVAR_BIAS
    return made


def _transformer() -> Any:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
