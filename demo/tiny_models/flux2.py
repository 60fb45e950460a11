"""A tiny FLUX.2 klein and dev with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import qwen3, write_qwen_tokenizer
from demo.tiny_models.mistral import mistral3, write_pixtral_processor
from demo.tiny_models.parts import assemble, flow_schedule

_TEXT_WIDTH = 16
_KLEIN_LAYERS, _DEV_LAYERS = 27, 30
"""Layers of the language model: klein's pipeline uses hidden states 9, 18 and 27, dev's 10, 20 and 30."""

_CHANNELS = 8
_MEAN_GAIN = 32.0
_LOGVAR_BIAS = -8.0


def make_tiny_flux2_klein(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `Flux2KleinPipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "Flux2KleinPipeline",
        {
            "vae": flux2_vae,
            "transformer": partial(_transformer, guidance=False),
            "text_encoder": partial(qwen3, "Qwen3ForCausalLM", width=_TEXT_WIDTH, layers=_KLEIN_LAYERS),
            "scheduler": partial(flow_schedule, shift=3.0, use_dynamic_shifting=True),
        },
        tokenizers={"tokenizer": write_qwen_tokenizer},
        seed=seed,
        index={"is_distilled": False},
    )


def make_tiny_flux2_dev(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `Flux2Pipeline.from_pretrained(folder)` loads it if torchvision is installed, which the image processor
    requires. It draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "Flux2Pipeline",
        {
            "vae": flux2_vae,
            "transformer": partial(_transformer, guidance=True),
            "text_encoder": partial(mistral3, width=_TEXT_WIDTH, layers=_DEV_LAYERS),
            "scheduler": partial(flow_schedule, shift=3.0, use_dynamic_shifting=True),
        },
        tokenizers={"tokenizer": write_pixtral_processor},
        seed=seed,
    )


def flux2_vae() -> Any:
    """Return an `AutoencoderKLFlux2` with 8 channels and factor 8, or 16 per value of its patched latent."""
    import torch
    from diffusers import AutoencoderKLFlux2

    made: Any = AutoencoderKLFlux2(
        block_out_channels=(16, 16, 32, 32),
        layers_per_block=1,
        latent_channels=_CHANNELS,
        norm_num_groups=8,
        sample_size=64,
    )
    with torch.no_grad():
        made.quant_conv.weight[:_CHANNELS] *= _MEAN_GAIN
        made.quant_conv.bias[_CHANNELS:] = _LOGVAR_BIAS
        made.bn.running_mean.normal_(std=0.3)
        made.bn.running_var.uniform_(0.5, 2.0)
    return made


def _transformer(*, guidance: bool) -> Any:
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        in_channels=4 * _CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * _TEXT_WIDTH,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )
