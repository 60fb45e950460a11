"""Text encoders that a recipe trains, on the meta device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pipeline.trained_lora.worker.adapter.lora import add_lora
from pipeline.trained_lora.worker.memory.skeletons import text_encoder_skeleton

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import Recipe

TOKENS = 77
"""Length of a caption for CLIP, the only kind of text encoder that is trained."""


def trained_skeletons(family: WorkerFamily, recipe: Recipe, dtype: str) -> list[nn.Module]:
    """Return the text encoders with adapters, as `trained_text_encoders`; none if the recipe trains none."""
    lora = recipe.training.lora
    settings, text_settings = lora.of_text_encoders, lora.text_encoders
    if settings is None or text_settings is None:
        return []

    networks: list[nn.Module] = []
    for role, clip in family.trainable_text_encoders().items():
        network = text_encoder_skeleton(family, role, dtype)
        targets = clip.targets(text_settings.targets)
        with torch.device("meta"):
            add_lora(cast("PreTrainedModel", network), settings, targets=targets, seed=0)
        networks.append(network.train())
    return networks


def text_loss(networks: list[nn.Module], batch_size: int) -> Tensor | float:
    """Return a number whose graph holds what the encoders of a batch keep for the backward pass."""
    total: Any = 0.0
    for network in networks:
        ids = torch.zeros(batch_size, TOKENS, dtype=torch.long, device="meta")
        output = cast("Any", network)(input_ids=ids, output_hidden_states=True)

        # Families use the last layer, the one before it, or the pooled output.
        total = total + output.hidden_states[-2].float().mean() + output[0].float().mean()
    return total
