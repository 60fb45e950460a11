"""A tiny Bria FIBO with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import byte_level, vocabulary
from demo.tiny_models.parts import assemble, flow_schedule, write_json
from pipeline.storage.atomic import write_text

_CHANNELS = 48
_TEXT_WIDTH = 16
_TEXT_LAYERS = 2
_MARKS = ("<|end_of_text|>", "<|pad|>")
_NUM_TOKENS = 128_001
"""Vocabulary size; the pipeline encodes an empty prompt as the last token, by its number."""

_MEAN_GAIN = 8.0
_LOGVAR_BIAS = -8.0


def make_tiny_bria_fibo(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `BriaFiboPipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "BriaFiboPipeline",
        {
            "vae": _vae,
            "transformer": _transformer,
            "text_encoder": _smollm3,
            "scheduler": partial(flow_schedule, use_dynamic_shifting=True),
        },
        tokenizers={"tokenizer": _write_tokenizer},
        seed=seed,
    )


def _write_tokenizer(folder: Path) -> str:
    """Write a `PreTrainedTokenizerFast` that adds no marks to a text, and return its class name."""
    write_text(folder / "tokenizer.json", byte_level(_MARKS).to_str(pretty=True))
    config = {
        "eos_token": _MARKS[0],
        "model_max_length": 4096,
        "pad_token": _MARKS[1],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", config)
    return "PreTrainedTokenizerFast"


def _smollm3() -> Any:
    """Return a `SmolLM3ForCausalLM` for the tokenizer's tokens and the token of an empty prompt."""
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    ids = vocabulary(_MARKS)[0]
    sizes: dict[str, Any] = {
        "vocab_size": _NUM_TOKENS,
        "hidden_size": _TEXT_WIDTH,
        "intermediate_size": 2 * _TEXT_WIDTH,
        "num_hidden_layers": _TEXT_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "no_rope_layer_interval": 2,
        "bos_token_id": _NUM_TOKENS - 1,
        "eos_token_id": ids[_MARKS[0]],
        "pad_token_id": ids[_MARKS[1]],
    }
    return SmolLM3ForCausalLM(SmolLM3Config(**sizes))


def _vae() -> Any:
    """Return an `AutoencoderKLWan` with 48 channels, residual blocks and factor 16, 2 of it from patches."""
    import torch
    from diffusers import AutoencoderKLWan

    mean, std = ([start + 0.01 * channel for channel in range(_CHANNELS)] for start in (-0.2, 0.5))
    made: Any = AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=_CHANNELS,
        num_res_blocks=1,
        latents_mean=mean,
        latents_std=std,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )
    with torch.no_grad():
        made.quant_conv.weight[:_CHANNELS] *= _MEAN_GAIN
        made.quant_conv.bias[_CHANNELS:] = _LOGVAR_BIAS
    return made


def _transformer() -> Any:
    """Return a transformer with more blocks than the language model has layers, as in the real model."""
    from diffusers import BriaFiboTransformer2DModel

    return BriaFiboTransformer2DModel(
        in_channels=_CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=2 * _TEXT_WIDTH,
        axes_dims_rope=[4, 6, 6],
        text_encoder_dim=_TEXT_WIDTH,
    )
