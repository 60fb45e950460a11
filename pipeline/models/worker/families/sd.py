"""Stable Diffusion 1.x and 2.x."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeline.models.worker.text import TextConditioner


class OneClipConditioner(TextConditioner):
    """The last hidden state of one CLIP."""

    embeds_batches = True
    is_clip = True

    def embed(self, encoders: Any, caption: str | list[str]) -> dict[str, Tensor]:
        embedding, _ = encoders.encode_prompt(
            caption, encoders.device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        return {"text_embedding": embedding}
