"""A FLUX.1 with about a million random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.parts import (
    assemble,
    clip,
    flow_schedule,
    t5,
    vae,
    write_clip_tokenizer,
    write_t5_tokenizer,
)

_POOLED_WIDTH = 32
_T5_WIDTH = 48


def make_tiny_flux(folder: Path, *, schnell: bool = False, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `FluxPipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        schnell: Whether to write FLUX.1 schnell, without guidance and with a fixed shift, instead of dev.
        seed: Seed of the random weights.
    """
    _write(folder, "FluxPipeline", guidance=not schnell, seed=seed)


def make_tiny_flux_kontext(folder: Path, *, seed: int = 0) -> None:
    """Write a FLUX.1 Kontext, which `FluxKontextPipeline` loads; see `make_tiny_flux`."""
    _write(folder, "FluxKontextPipeline", guidance=True, seed=seed)


def _write(folder: Path, pipeline_class: str, *, guidance: bool, seed: int) -> None:
    shift: dict[str, Any] = {"shift": 3.0, "use_dynamic_shifting": True} if guidance else {"shift": 1.0}
    assemble(
        folder,
        pipeline_class,
        {
            "vae": partial(vae, channels=16, scaling_factor=0.3611, shift_factor=0.1159, quant=False),
            "transformer": partial(_transformer, guidance=guidance),
            "text_encoder": partial(clip, width=_POOLED_WIDTH),
            "text_encoder_2": partial(t5, width=_T5_WIDTH),
            "scheduler": partial(flow_schedule, **shift),
        },
        tokenizers={"tokenizer": write_clip_tokenizer, "tokenizer_2": write_t5_tokenizer},
        seed=seed,
        index={"feature_extractor": [None, None], "image_encoder": [None, None]},
    )


def _transformer(*, guidance: bool) -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_T5_WIDTH,
        pooled_projection_dim=_POOLED_WIDTH,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 6, 6),
    )
