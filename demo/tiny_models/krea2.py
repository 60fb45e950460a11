"""A tiny Krea 2 with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import QWEN_MARKS, qwen3_vl, write_qwen_tokenizer
from demo.tiny_models.parts import assemble, flow_schedule
from demo.tiny_models.qwen_image import qwen_vae

_TEXT_WIDTH = 32
_LAYERS = (1, 2, 3)
_MARKS = (*QWEN_MARKS, "assistant")
"""Marks, and the last word of the template, whose number of tokens the pipeline hard-codes."""


def make_tiny_krea2(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `Krea2Pipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "Krea2Pipeline",
        {
            "vae": qwen_vae,
            "transformer": _transformer,
            "text_encoder": partial(qwen3_vl, width=_TEXT_WIDTH, layers=len(_LAYERS), marks=_MARKS),
            "scheduler": partial(flow_schedule, use_dynamic_shifting=True, max_image_seq_len=6400),
        },
        tokenizers={"tokenizer": partial(write_qwen_tokenizer, marks=_MARKS)},
        seed=seed,
        index={"is_distilled": False, "patch_size": 2, "text_encoder_select_layers": list(_LAYERS)},
    )


def _transformer() -> Any:
    import torch
    from diffusers import Krea2Transformer2DModel

    made: Any = Krea2Transformer2DModel(
        in_channels=64,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        timestep_embed_dim=32,
        text_hidden_dim=_TEXT_WIDTH,
        num_text_layers=len(_LAYERS),
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=64,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    with torch.no_grad():  # zeros until they are trained
        for name, weight in made.named_parameters():
            if name.endswith("scale_shift_table"):
                weight.normal_(std=0.1)
    return made
