"""A tiny Chroma with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.parts import assemble, flow_schedule, t5, vae, write_t5_tokenizer

_T5_WIDTH = 48


def make_tiny_chroma(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `ChromaPipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "ChromaPipeline",
        {
            "vae": partial(vae, channels=16, scaling_factor=0.3611, shift_factor=0.1159, quant=False),
            "transformer": _transformer,
            "text_encoder": partial(t5, width=_T5_WIDTH),
            "scheduler": partial(flow_schedule, shift=3.0, use_dynamic_shifting=True),
        },
        tokenizers={"tokenizer": write_t5_tokenizer},
        seed=seed,
        index={"feature_extractor": [None, None], "image_encoder": [None, None]},
    )


def _transformer() -> Any:
    from diffusers import ChromaTransformer2DModel

    return ChromaTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_T5_WIDTH,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=16,
        approximator_hidden_dim=32,
        approximator_layers=1,
    )
