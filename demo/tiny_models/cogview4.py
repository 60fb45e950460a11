"""A tiny CogView4 with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import glm, write_glm_tokenizer
from demo.tiny_models.parts import assemble, flow_schedule, vae

_TEXT_WIDTH = 48


def make_tiny_cogview4(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `CogView4Pipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    shift: dict[str, Any] = {"base_shift": 0.25, "max_shift": 0.75, "base_image_seq_len": 256}
    assemble(
        folder,
        "CogView4Pipeline",
        {
            "vae": partial(vae, channels=16, scaling_factor=1.0, shift_factor=0.0, quant=False),
            "transformer": _transformer,
            "text_encoder": partial(glm, width=_TEXT_WIDTH),
            "scheduler": partial(flow_schedule, use_dynamic_shifting=True, time_shift_type="linear", **shift),
        },
        tokenizers={"tokenizer": write_glm_tokenizer},
        seed=seed,
    )


def _transformer() -> Any:
    from diffusers import CogView4Transformer2DModel

    return CogView4Transformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        out_channels=16,
        text_embed_dim=_TEXT_WIDTH,
        time_embed_dim=32,
        condition_dim=16,
        sample_size=8,
        rope_axes_dim=(64, 64),
    )
