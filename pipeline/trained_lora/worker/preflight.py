"""Pre-flight: save, reload and export once before training, to surface failures in the first minute."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipeline.errors import TrainingError
from pipeline.trained_lora.worker.checkpoint import load_checkpoint, save_checkpoint
from pipeline.trained_lora.worker.ema import restored_afterwards

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.trained_lora.run_folder import RunLayout
    from pipeline.trained_lora.worker.engine import Engine

_PERTURBATION_STD = 0.01
"""Standard deviation of the perturbation; trained LoRA weights have about this size."""


def run_preflight(engine: Engine, layout: RunLayout, run: str, export: Callable[[Path], object]) -> None:
    """Save a checkpoint, reload it, and export the adapter (FAILURES R08).

    `export` writes the adapter's files into a folder and verifies them.

    Raises:
        TrainingError: The checkpoint does not read back as it was saved, or `export` failed.
    """
    state = engine.state(0)
    path = save_checkpoint(layout.checkpoints, run, state)
    reloaded = load_checkpoint(path, run)
    if set(state.adapter) != set(reloaded.adapter) or not all(
        torch.equal(weight, reloaded.adapter[name]) for name, weight in state.adapter.items()
    ):
        raise TrainingError(
            "a checkpoint does not read back as it was saved",
            where=str(path),
            fix="check the disk that holds output_dir",
        )

    # A fresh adapter is zero, and zeros pass verification at any scale: verify nonzero weights.
    folder = layout.exported.with_name("lora.preflight")
    with perturbed_weights(engine.weights):
        export(folder)
    shutil.rmtree(folder)


@contextmanager
def perturbed_weights(weights: Sequence[nn.Parameter]) -> Generator[None]:
    """Add small random numbers to all weights within the context, and restore them bit for bit afterwards.

    The global random state does not change.
    """
    random = torch.Generator().manual_seed(0)
    with restored_afterwards(weights):
        with torch.no_grad():
            for weight in weights:
                noise = torch.randn(weight.shape, generator=random).to(weight.device)
                weight.add_(noise, alpha=_PERTURBATION_STD)
        yield
