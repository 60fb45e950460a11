"""A tiny Lumina Image 2 with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import gemma2, write_gemma_tokenizer
from demo.tiny_models.parts import assemble, flow_schedule, vae

_TEXT_WIDTH = 48


def make_tiny_lumina2(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `Lumina2Pipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "Lumina2Pipeline",
        {
            "vae": partial(vae, channels=16, scaling_factor=0.3611, shift_factor=0.1159, quant=False),
            "transformer": _transformer,
            "text_encoder": partial(gemma2, width=_TEXT_WIDTH),
            "scheduler": partial(flow_schedule, shift=6.0),
        },
        tokenizers={"tokenizer": write_gemma_tokenizer},
        seed=seed,
    )


def _transformer() -> Any:
    from diffusers import Lumina2Transformer2DModel

    sizes: dict[str, Any] = {
        "sample_size": 8,
        "in_channels": 16,
        "hidden_size": 48,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "multiple_of": 16,
        "axes_dim_rope": (4, 4, 4),
        "axes_lens": (300, 64, 64),
        "cap_feat_dim": _TEXT_WIDTH,
    }
    return Lumina2Transformer2DModel(**sizes)
