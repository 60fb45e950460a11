"""A tiny Z-Image with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import qwen3, write_qwen_tokenizer
from demo.tiny_models.parts import assemble, flow_schedule, vae

_TEXT_WIDTH = 48


def make_tiny_z_image(folder: Path, *, turbo: bool = False, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `ZImagePipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        turbo: Whether to write Z-Image-Turbo, with a smaller shift, instead of Z-Image.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "ZImagePipeline",
        {
            "vae": partial(vae, channels=16, scaling_factor=0.3611, shift_factor=0.1159, quant=False),
            "transformer": _transformer,
            "text_encoder": partial(qwen3, width=_TEXT_WIDTH),
            "scheduler": partial(flow_schedule, shift=3.0 if turbo else 6.0),
        },
        tokenizers={"tokenizer": write_qwen_tokenizer},
        seed=seed,
    )


def _transformer() -> Any:
    import torch
    from diffusers import ZImageTransformer2DModel

    sizes: dict[str, Any] = {
        "dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": _TEXT_WIDTH,
        "axes_dims": [4, 6, 6],
        "axes_lens": [1024, 64, 64],
    }
    made: Any = ZImageTransformer2DModel(**sizes)
    with torch.no_grad():  # learned, and left empty until then
        for token in (made.x_pad_token, made.cap_pad_token):
            token.normal_(std=0.02)
    return made
