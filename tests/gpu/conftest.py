"""Tests on a real GPU, with tiny models. They need torch, diffusers and the pipeline, but not Dagster.

Some files run the stages, which write tables and therefore need Pandera; without it, they are skipped.

On a machine without the test suite's other packages, run them alone:

    python -m pytest tests/gpu --confcutdir=tests/gpu

Without CUDA they are skipped. LATENTLINE_GPU_TESTS=cpu runs everything that a CPU can run.
"""

from __future__ import annotations

import os
from pathlib import Path

# Set before torch is imported: spinning OpenMP threads lose all progress on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Device of the tests."""
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("LATENTLINE_GPU_TESTS") == "cpu":
        torch.set_num_threads(1)
        return "cpu"
    pytest.skip("needs a CUDA device")


@pytest.fixture
def cuda(device: str) -> str:
    """The device of tests that no CPU can run."""
    if device == "cpu":
        pytest.skip("needs a CUDA device; a CPU cannot run it")
    return device


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for tiny models of all families."""
    return tmp_path_factory.mktemp("families")
