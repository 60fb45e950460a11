"""Models of every family with few random weights, made offline: for the demo and the tests.

Every class is the one of the real model; only the sizes are small. Their pictures mean nothing.
"""

from __future__ import annotations

from pipeline.families.tiny.flux import make_tiny_flux
from pipeline.families.tiny.sd import make_tiny
from pipeline.families.tiny.sd3 import make_tiny_sd3
from pipeline.families.tiny.sdxl import make_tiny_sdxl

__all__ = ["make_tiny", "make_tiny_flux", "make_tiny_sd3", "make_tiny_sdxl"]
