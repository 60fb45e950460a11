"""A tiny AuraFlow with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import umt5, write_llama_tokenizer
from demo.tiny_models.parts import assemble, flow_schedule, vae

_TEXT_WIDTH = 48
_GATE_GAIN = 8.0
"""Factor for the weights of the gates: untrained gates pass almost nothing."""


def make_tiny_aura_flow(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `AuraFlowPipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "AuraFlowPipeline",
        {
            "vae": partial(vae, scaling_factor=0.13025),
            "transformer": _transformer,
            "text_encoder": partial(umt5, width=_TEXT_WIDTH),
            "scheduler": partial(flow_schedule, shift=1.73),
        },
        tokenizers={"tokenizer": write_llama_tokenizer},
        seed=seed,
    )


def _transformer() -> Any:
    import torch
    from diffusers import AuraFlowTransformer2DModel

    made: Any = AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_TEXT_WIDTH,
        caption_projection_dim=32,
        pos_embed_max_size=144,
    )
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if ".norm1" in name:
                weight.mul_(_GATE_GAIN)
    return made
