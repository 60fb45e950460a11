"""The optimizer and its learning-rate schedule, from the libraries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from diffusers.optimization import get_scheduler

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR

    from pipeline.recipe import TrainingSettings

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
"""A recipe's `lr_scheduler` and what diffusers calls it; each rises from zero over `warmup_steps` first."""


def make_optimizer(
    weights: Iterable[torch.nn.Parameter], settings: TrainingSettings
) -> torch.optim.Optimizer:
    """AdamW over the LoRA's weights, with PyTorch's betas, epsilon and weight decay."""
    return torch.optim.AdamW(weights, lr=settings.learning_rate)


def make_schedule(optimizer: torch.optim.Optimizer, settings: TrainingSettings) -> LambdaLR:
    """A schedule that is stepped once an optimizer step, whatever the number of processes.

    It is not given to accelerate, which would step it once a process and step (FAILURES R04).
    """
    return get_scheduler(
        SCHEDULES[settings.lr_scheduler],
        optimizer=optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=settings.steps,
    )
