"""A tiny ERNIE-Image with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.flux2 import flux2_vae
from demo.tiny_models.mistral import ministral3, mistral3, write_mistral_tokenizer, write_rewriter_tokenizer
from demo.tiny_models.parts import assemble, flow_schedule

_TEXT_WIDTH = 48
_CHANNELS = 32
"""Number of channels of the patched latent."""


def make_tiny_ernie_image(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `ErnieImagePipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "ErnieImagePipeline",
        {
            "vae": flux2_vae,
            "transformer": _transformer,
            "text_encoder": partial(mistral3, "Mistral3Model", width=_TEXT_WIDTH),
            "pe": ministral3,
            "scheduler": partial(flow_schedule, shift=3.0),
        },
        tokenizers={
            "tokenizer": partial(write_mistral_tokenizer, max_length=256),
            "pe_tokenizer": write_rewriter_tokenizer,
        },
        seed=seed,
    )


def _transformer() -> Any:
    import torch
    from diffusers import ErnieImageTransformer2DModel

    made: Any = ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=64,
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        text_in_dim=_TEXT_WIDTH,
        rope_axes_dim=(4, 6, 6),
    )
    with torch.no_grad():  # zeros until they are trained, and so the answer to everything
        for layer in (made.adaLN_modulation[-1], made.final_linear):
            layer.weight.normal_(std=0.1)
            layer.bias.normal_(std=0.1)
    return made
