"""Tokens of FLUX.1 and Chroma: latents packed by the pipeline class's own functions, and position ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PATCH = 2
"""Edge, in latent values, of the patch that is packed into one token."""


def pack(pipeline: Any, noisy: Tensor) -> dict[str, Tensor]:
    """Return `hidden_states` and `img_ids` of a noisy latent (B, C, h, w)."""
    batch, channels, height, width = noisy.shape
    rows, columns = height // PATCH, width // PATCH
    return {
        "hidden_states": pipeline._pack_latents(noisy, batch, channels, height, width),
        "img_ids": pipeline._prepare_latent_image_ids(batch, rows, columns, noisy.device, torch.float32),
    }


def text_ids(text: Tensor) -> Tensor:
    """Return zeros (T, 3), the position ids that the pipelines give to text tokens (B, T, D)."""
    return text.new_zeros(text.shape[1], 3)


def unpack(pipeline: Any, tokens: Tensor, noisy: Tensor, factor: int) -> Tensor:
    """Rearrange the transformer's output tokens (B, T, D) into a latent (B, C, h, w).

    Args:
        pipeline: diffusers' pipeline class; its `_unpack_latents` does the work.
        tokens: Output of the transformer, one token per 2x2 patch of the latent; further tokens, which belong
            to a reference image, are ignored.
        noisy: Latent (B, C, h, w) that was packed into the transformer's input.
        factor: Downscaling factor of the VAE; `_unpack_latents` takes the image's size in pixels.
    """
    height, width = noisy.shape[2:]
    tokens = tokens[:, : (height // PATCH) * (width // PATCH)]
    return pipeline._unpack_latents(tokens, height * factor, width * factor, factor)
