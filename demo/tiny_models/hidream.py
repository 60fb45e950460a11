"""A tiny HiDream with random weights, including the Llama that users provide."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.llama import llama, write_llama3_tokenizer
from demo.tiny_models.parts import assemble, clip, t5, vae, write_clip_tokenizer, write_t5_tokenizer

_CLIP_WIDTHS = 32, 16
_T5_WIDTH = 48
_LLAMA_WIDTH = 24
_LLAMA_LAYERS = 3
_TOKENS = 128
"""Number of tokens that each encoder takes, CLIP included."""


def make_tiny_hidream(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `HiDreamImagePipeline.from_pretrained(folder)` loads it. It draws pictures of 64x64 pixels if the
    pipeline's `default_sample_size` is 8.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    from diffusers import UniPCMultistepScheduler

    solver: dict[str, Any] = {
        "flow_shift": 3.0,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
    }
    clips = {
        role: partial(clip, "CLIPTextModelWithProjection", width=width, max_length=_TOKENS)
        for role, width in zip(("text_encoder", "text_encoder_2"), _CLIP_WIDTHS, strict=True)
    }
    assemble(
        folder,
        "HiDreamImagePipeline",
        {
            "vae": partial(vae, channels=16, scaling_factor=0.3611, shift_factor=0.1159, quant=False),
            "transformer": _transformer,
            **clips,
            "text_encoder_3": partial(t5, width=_T5_WIDTH),
            "text_encoder_4": partial(llama, width=_LLAMA_WIDTH, layers=_LLAMA_LAYERS),
            "scheduler": lambda: UniPCMultistepScheduler(**solver),
        },
        tokenizers={
            "tokenizer": write_clip_tokenizer,
            "tokenizer_2": write_clip_tokenizer,
            "tokenizer_3": write_t5_tokenizer,
            "tokenizer_4": write_llama3_tokenizer,
        },
        seed=seed,
    )


def _transformer() -> Any:
    from diffusers import HiDreamImageTransformer2DModel

    sizes: dict[str, Any] = {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "caption_channels": [_T5_WIDTH, _LLAMA_WIDTH],
        "text_emb_dim": sum(_CLIP_WIDTHS),
        "num_routed_experts": 4,
        "num_activated_experts": 2,
        "axes_dims_rope": (8, 4, 4),
        "max_resolution": (16, 16),
        "llama_layers": [0, 1, 2, 2],
    }
    return HiDreamImageTransformer2DModel(**sizes)
