"""Models of every family with few random weights, made offline: for the demo and the tests.

Every class is the one of the real model; only the sizes are small. Their pictures mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from pipeline.families.tiny.flux import make_tiny_flux
from pipeline.families.tiny.sd import make_tiny
from pipeline.families.tiny.sd3 import make_tiny_sd3
from pipeline.families.tiny.sdxl import make_tiny_sdxl

TINY: dict[str, Callable[[Path], None]] = {
    "Stable Diffusion 1.x and 2.x": make_tiny,
    "Stable Diffusion XL": make_tiny_sdxl,
    "Stable Diffusion 3 and 3.5": make_tiny_sd3,
    "FLUX.1 dev": make_tiny_flux,
    "FLUX.1 schnell": partial(make_tiny_flux, schnell=True),
}
"""A kind of model to what writes a tiny one into a folder; at least one of each family."""

__all__ = ["TINY", "make_tiny", "make_tiny_flux", "make_tiny_sd3", "make_tiny_sdxl"]
