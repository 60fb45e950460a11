"""What a run does at its end, done before its first step: none of it fails for the first time there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipeline.errors import TrainingError
from pipeline.trained_lora.worker.checkpoint import load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.trained_lora.run_folder import RunLayout
    from pipeline.trained_lora.worker.engine import Engine

_STIR = 0.01
"""Standard deviation of what is added to a weight: about as large as weights get in training."""


def run_preflight(engine: Engine, layout: RunLayout, run: str, export: Callable[[Path], object]) -> None:
    """Save, reload and export (FAILURES R08).

    A fresh adapter adds nothing, and files of nothing are equal whatever they are scaled by: what is exported
    is one whose weights are all other than zero.

    Args:
        engine: As training will begin.
        layout: Of the run.
        run: Its id.
        export: Writes the adapter's files into a folder and reads them back.

    Raises:
        TrainingError: The checkpoint does not read back as it was saved, or `export` failed.
    """
    state = engine.state(0)
    path = save_checkpoint(layout.checkpoints, run, state)
    reloaded = load_checkpoint(path, run)
    same = all(torch.equal(weight, reloaded.adapter[name]) for name, weight in state.adapter.items())
    if not same or set(state.adapter) != set(reloaded.adapter):
        fix = "see that output_dir lies on a working disk"
        what = "a checkpoint does not read back as it was saved"
        raise TrainingError(what, where=str(path), fix=fix)
    folder = layout.exported.with_name("lora.rehearsal")
    with perturbed_weights(engine.weights):
        export(folder)
    shutil.rmtree(folder)


@contextmanager
def perturbed_weights(weights: Sequence[nn.Parameter]) -> Generator[None]:
    """Inside, every weight is another number; afterwards each is what it was, bit for bit.

    Global random state is left alone.
    """
    kept = [weight.detach().clone() for weight in weights]
    random = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for weight in weights:
                weight.add_(torch.randn(weight.shape, generator=random).to(weight.device), alpha=_STIR)
        yield
    finally:
        with torch.no_grad():
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before)
