"""Stable Diffusion XL."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeline.models.worker.text import PooledConditioner


class TwoClipConditioner(PooledConditioner):
    """The hidden states of two CLIPs, and the projection of the second one."""

    is_clip = True

    def embed(self, encoders: Any, caption: str | list[str]) -> dict[str, Tensor]:
        embedding, _, pooled, _ = encoders.encode_prompt(
            caption, device=encoders.device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}
