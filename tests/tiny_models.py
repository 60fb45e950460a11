"""Tiny base models that are built once per session and shared by all xdist workers; tests only read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

TinyModel: TypeAlias = Callable[[str], Path]
"""Returns the folder of a model, by its kind in `demo.tiny_models.TINY`."""


@pytest.fixture(scope="session")
def tiny_model(shared_folder: Callable[[str, Callable[[Path], object]], Path]) -> TinyModel:
    """Return a function that builds a tiny model of a kind if no test has needed it yet."""

    def of_kind(kind: str) -> Path:
        from demo.tiny_models import TINY

        return shared_folder(f"tiny {kind}", TINY[kind])

    return of_kind


@pytest.fixture(scope="session")
def tiny_sd(tiny_model: TinyModel) -> Path:
    """The tiny Stable Diffusion with epsilon prediction."""
    return tiny_model("Stable Diffusion 1.x and 2.x")


@pytest.fixture(scope="session")
def tiny_sdxl(tiny_model: TinyModel) -> Path:
    """The tiny Stable Diffusion XL."""
    return tiny_model("Stable Diffusion XL")
