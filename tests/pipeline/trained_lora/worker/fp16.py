"""fp16's loss scaling on a CPU, where accelerate does not allow it."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from pipeline.trained_lora.worker.engine import Engine


def with_loss_scaling(engine: Engine) -> Engine:
    """Return the engine with torch's gradient scaler and autocast with fp16, as accelerate sets them up."""
    accelerator: Any = engine.accelerator
    accelerator.scaler = torch.amp.GradScaler("cpu")
    engine._optimizer = AcceleratedOptimizer(engine._optimizer.optimizer, scaler=accelerator.scaler)
    accelerator._optimizers[:] = [engine._optimizer]
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    return engine
