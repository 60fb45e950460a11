"""Denoisers with random adapters, and runs of a setting that acts in training steps only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.worker.adapter.lora import add_lora, trainable_weights
from tests.pipeline.trained_lora.runs import outcome, run_until

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

LINEAR = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
CONVOLUTION = "down_blocks.0.resnets.0.conv1"


def random_adapters(base: Path, lora: LoraSettings) -> nn.Module:
    """Return the denoiser of a base model with adapters of these settings, ready to train."""
    family = load_family(base)
    denoiser = cast("Any", family.denoiser.load("float32", "cpu"))
    add_lora(denoiser, lora, targets=family.lora_targets(), seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in trainable_weights(denoiser):
            weight.copy_(torch.randn(weight.shape, generator=draw))
    return denoiser.train()


def check_runs(project: Project) -> None:
    """Check that a stopped run of 3 steps resumes, and that recomputed activations draw the same numbers.

    A run without the setting, with the same `rank` and `alpha`, must have other losses.
    """
    whole = project.job()
    run_until(whole)
    expected = outcome(whole)

    stopped = project.changed("stopped").job()
    run_until(stopped, 1)
    run_until(stopped, start=1)
    assert outcome(stopped) == expected

    recomputed = project.changed("recomputed", gradient_checkpointing=True).job()
    run_until(recomputed)
    assert outcome(recomputed).steps == expected.steps

    lora = project.recipe.training.lora
    plain = project.changed("plain", lora=LoraSettings(rank=lora.rank, alpha=lora.alpha)).job()
    run_until(plain)
    assert outcome(plain).steps != expected.steps
