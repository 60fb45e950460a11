"""A tiny Ideogram 4 with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.flux2 import flux2_vae
from demo.tiny_models.language import PARTS_TEMPLATE, qwen3_vl, write_qwen_tokenizer
from demo.tiny_models.parts import assemble, flow_schedule

_TEXT_WIDTH = 16
_TEXT_LAYERS = 36
"""Layers of the language model; the pipeline uses the last hidden state and twelve before it."""


def make_tiny_ideogram4(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `Ideogram4Pipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "Ideogram4Pipeline",
        {
            "vae": flux2_vae,
            "transformer": _transformer,
            "unconditional_transformer": partial(_transformer, draws=1),
            "text_encoder": partial(qwen3_vl, width=_TEXT_WIDTH, layers=_TEXT_LAYERS),
            "scheduler": flow_schedule,
        },
        tokenizers={"tokenizer": partial(write_qwen_tokenizer, template=PARTS_TEMPLATE)},
        seed=seed,
    )


def _transformer(*, draws: int = 0) -> Any:
    """Return one of the two transformers, which differ only in their random weights."""
    import torch
    from diffusers import Ideogram4Transformer2DModel

    torch.rand(draws)
    return Ideogram4Transformer2DModel(
        in_channels=32,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        intermediate_size=64,
        adaln_dim=32,
        llm_features_dim=13 * _TEXT_WIDTH,
        mrope_section=(4, 2, 2),
    )
