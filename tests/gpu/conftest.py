"""Tests on a real GPU, with tiny models. They need torch, diffusers and the pipeline, but not Dagster.

On a machine without the test suite's other packages, run them alone:

    python -m pytest tests/gpu --confcutdir=tests/gpu

Without CUDA they are skipped. LATENTLINE_GPU_TESTS=cpu runs everything that a CPU can run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

# Set before torch is imported: spinning OpenMP threads lose all progress on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest
import torch
from PIL import Image

from bench.gpu.models import MODELS
from bench.gpu.rig import TINY, Bench, Rig
from bench.gpu.training import one_accelerator

NUM_IMAGES = 4


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
def make_rig(device: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rig]:
    """Return a function that returns a tiny model with a recipe and a cache, by the model's name."""
    bench = Bench(tmp_path_factory.mktemp("gpu"), device, replace(TINY, images=NUM_IMAGES, steps=4))
    photos = bench.folder / "photos"
    photos.mkdir()
    random = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        pixels = random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(photos / f"{number}.png")
        (photos / f"{number}.txt").write_text(f"picture {number}\n", encoding="utf-8")
    return lambda name: bench.rig(next(model for model in MODELS if model.name == name), "cached")


@pytest.fixture
def rig(make_rig: Callable[[str], Rig]) -> Iterator[Rig]:
    """A tiny FLUX.1, with accelerate's process-wide state reset before and after the test."""
    with one_accelerator():
        yield make_rig("FLUX.1")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for tiny models of all families."""
    return tmp_path_factory.mktemp("families")
