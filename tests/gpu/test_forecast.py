"""The memory forecast against steps on a GPU, for models of few blocks but the published width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.images.geometry import Size
from tests.gpu.shallow_models import FEW_BLOCKS, shallow

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, dict[str, Any]] = {
    "checkpointed": {"gradient_checkpointing": True},
    "stored": {"gradient_checkpointing": False},
    "averaged": {"gradient_checkpointing": True, "ema_decay": 0.99},
    "8-bit optimizer": {"gradient_checkpointing": True, "optimizer": "adamw8bit"},
}


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", FEW_BLOCKS)
def test_the_forecast_of_a_step_is_what_the_gpu_allocates(
    cuda: str, tmp_path: Path, name: str, kind: str
) -> None:
    if kind == "8-bit optimizer":
        pytest.importorskip("bitsandbytes")
    model = shallow(name, tmp_path, Size(1024, 1024), **SETTINGS[kind])
    forecast = model.forecast.memory(model.forecast.variant)

    before_bytes = torch.cuda.memory_allocated()
    denoiser = model.denoiser(cuda)
    model.train(denoiser, cuda, offload="none", begin=torch.cuda.reset_peak_memory_stats)
    measured_bytes = torch.cuda.max_memory_allocated() - before_bytes
    assert forecast.device == pytest.approx(measured_bytes, rel=0.15)
