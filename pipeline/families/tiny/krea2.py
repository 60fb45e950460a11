"""A tiny Krea 2 of random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from pipeline.families.tiny.language import QWEN_MARKS, vocabulary, write_qwen_tokenizer
from pipeline.families.tiny.parts import assemble, flow_schedule
from pipeline.families.tiny.qwen_image import qwen_vae

_TEXT_WIDTH = 32
_LAYERS = (1, 2, 3)
_MARKS = (*QWEN_MARKS, "assistant")
"""With the word behind captions in the template, of which the pipeline knows how many tokens it takes."""


def make_tiny_krea2(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; the same bytes for the same arguments.

    It is read by `Krea2Pipeline.from_pretrained(folder)` and draws pictures of 64x64 pixels.

    Args:
        folder: Made with its parents; files that are there already are replaced.
        seed: Of the random weights.
    """
    assemble(
        folder,
        "Krea2Pipeline",
        {
            "vae": qwen_vae,
            "transformer": _transformer,
            "text_encoder": _qwen3_vl,
            "scheduler": partial(flow_schedule, use_dynamic_shifting=True, max_image_seq_len=6400),
        },
        tokenizers={"tokenizer": partial(write_qwen_tokenizer, marks=_MARKS)},
        seed=seed,
        index={"is_distilled": False, "patch_size": 2, "text_encoder_select_layers": list(_LAYERS)},
    )


def _qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLModel

    ids = vocabulary(_MARKS)[0]
    text = {
        "vocab_size": len(ids),
        "hidden_size": _TEXT_WIDTH,
        "intermediate_size": 2 * _TEXT_WIDTH,
        "num_hidden_layers": len(_LAYERS),
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": _TEXT_WIDTH,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    marks: dict[str, Any] = {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }
    config: Any = Qwen3VLConfig(text_config=text, vision_config=vision, **marks)
    return Qwen3VLModel(config)


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
