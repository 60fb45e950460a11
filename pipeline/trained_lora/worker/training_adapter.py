"""The training adapter: a frozen LoRA of a distilled base model that only training steps see.

A distilled model loses its distillation when it is trained. Published training adapters undo the distillation
while training: the LoRA learns next to them, and works without them on the distilled model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipeline.errors import TrainingError
from pipeline.models.training_adapter import ADAPTER_KEY
from pipeline.trained_lora.worker.base_model import base_dtype
from pipeline.trained_lora.worker.frozen_lora import FrozenLora, frozen_weights

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.job import TrainingJob

_FIX = f"set {ADAPTER_KEY} to a LoRA of the denoiser, trained for this base model, that diffusers can load"


def load_training_adapter(job: TrainingJob, family: WorkerFamily, denoiser: nn.Module) -> FrozenLora:
    """Return the recipe's training adapter on a denoiser; without one, an adapter of no layer.

    Raises:
        TrainingError: The file is not a LoRA of this denoiser.
    """
    dtype = getattr(torch, base_dtype(family, job.recipe))
    path = job.training_adapter
    weights = {} if path is None else frozen_weights(path, family, denoiser, refused_adapter)
    return FrozenLora(denoiser, weights, dtype)


def refused_adapter(path: Path, reason: str) -> TrainingError:
    """Return the error for a training adapter that cannot be used."""
    return TrainingError(
        f"the training adapter cannot be used: {reason}", where=f"{ADAPTER_KEY}: {path}", fix=_FIX
    )
