"""The rules of CUDA's autocast that the CPU tests imitate."""

from __future__ import annotations

import pytest
import torch

from tests.pipeline.trained_lora.worker.cuda_autocast import (
    FLOAT32,
    LOWER_PRECISION,
    ImitatedCudaAutocast,
    calls,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [*LOWER_PRECISION, *FLOAT32])
def test_an_operation_under_autocast_returns_the_dtype_of_its_list(device: str, name: str) -> None:
    rules = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else ImitatedCudaAutocast()
    with rules:
        dtype = calls(device)[name]().dtype
    assert dtype == (torch.bfloat16 if name in LOWER_PRECISION else torch.float32)
