"""A tiny Anima with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import qwen3, write_qwen_tokenizer
from demo.tiny_models.parts import assemble_modular, flow_schedule, num_t5_tokens, write_t5_tokenizer
from demo.tiny_models.qwen_image import qwen_vae

_TEXT_WIDTH = 32
_CONDITION_WIDTH = 16


def make_tiny_anima(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a folder of a modular pipeline; equal arguments give equal bytes.

    `ModularPipeline.from_pretrained(folder)` reads it, and after `load_components` it draws pictures of 64x64
    pixels if torchvision is installed, with which diffusers resizes the transformer's padding mask.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble_modular(
        folder,
        "AnimaModularPipeline",
        {
            "vae": qwen_vae,
            "transformer": _transformer,
            "text_encoder": partial(qwen3, width=_TEXT_WIDTH),
            "text_conditioner": _text_conditioner,
            "scheduler": partial(flow_schedule, shift=3.0),
        },
        tokenizers={"tokenizer": write_qwen_tokenizer, "t5_tokenizer": write_t5_tokenizer},
        seed=seed,
        blocks="AnimaAutoBlocks",
    )


def _text_conditioner() -> Any:
    from diffusers import AnimaTextConditioner

    return AnimaTextConditioner(
        source_dim=_TEXT_WIDTH,
        target_dim=_CONDITION_WIDTH,
        model_dim=_CONDITION_WIDTH,
        num_layers=2,
        num_attention_heads=2,
        target_vocab_size=num_t5_tokens(),
    )


def _transformer() -> Any:
    from diffusers import CosmosTransformer3DModel

    made: Any = CosmosTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=18,
        num_layers=2,
        text_embed_dim=_CONDITION_WIDTH,
        adaln_lora_dim=8,
        max_size=(4, 64, 64),
        rope_scale=(1.0, 4.0, 4.0),
        extra_pos_embed_type=None,
    )
    return made
