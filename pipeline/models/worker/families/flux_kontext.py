"""FLUX.1 Kontext."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.images.geometry import Size
from pipeline.models.worker.denoiser import Conditions
from pipeline.models.worker.families.flux import FluxCall, pack
from pipeline.models.worker.inference import PipelineDrawing

# First position id of a reference's tokens; the noisy latent's is 0.
_REFERENCE_ID = 1


class KontextCall(FluxCall):
    """FLUX.1's transformer over the packed latent and its reference."""

    def image_tokens(self, noisy: Tensor, conditions: Conditions) -> dict[str, Tensor]:
        tokens = super().image_tokens(noisy, conditions)
        if not conditions.get("references"):
            return tokens

        (reference,) = conditions["references"]
        reference_tokens = pack(self.pipeline, reference.to(noisy.dtype))
        reference_tokens["img_ids"][:, 0] = _REFERENCE_ID
        return {
            "hidden_states": torch.cat([tokens["hidden_states"], reference_tokens["hidden_states"]], dim=1),
            "img_ids": torch.cat([tokens["img_ids"], reference_tokens["img_ids"]]),
        }


class KontextDrawing(PipelineDrawing):
    """Previews in any size."""

    def size_arguments(self, size: Size) -> dict[str, Any]:
        # The pipeline scales the size to `max_area`, a megapixel by default.
        return {**super().size_arguments(size), "max_area": size.height * size.width}
