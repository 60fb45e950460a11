"""Models of every family with few random weights, made offline: for the demo and the tests.

Every class is the one of the real model; only the sizes are small. Their pictures mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from pipeline.families.tiny.aura_flow import make_tiny_aura_flow
from pipeline.families.tiny.bria_fibo import make_tiny_bria_fibo
from pipeline.families.tiny.chroma import make_tiny_chroma
from pipeline.families.tiny.cogview4 import make_tiny_cogview4
from pipeline.families.tiny.ernie_image import make_tiny_ernie_image
from pipeline.families.tiny.flux import make_tiny_flux
from pipeline.families.tiny.flux2 import make_tiny_flux2_dev, make_tiny_flux2_klein
from pipeline.families.tiny.hidream import make_tiny_hidream
from pipeline.families.tiny.ideogram4 import make_tiny_ideogram4
from pipeline.families.tiny.kandinsky5 import make_tiny_kandinsky5
from pipeline.families.tiny.kolors import make_tiny_kolors
from pipeline.families.tiny.krea2 import make_tiny_krea2
from pipeline.families.tiny.lumina2 import make_tiny_lumina2
from pipeline.families.tiny.qwen_image import make_tiny_qwen_image
from pipeline.families.tiny.sana import make_tiny_sana
from pipeline.families.tiny.sd import make_tiny
from pipeline.families.tiny.sd3 import make_tiny_sd3
from pipeline.families.tiny.sdxl import make_tiny_sdxl
from pipeline.families.tiny.z_image import make_tiny_z_image

TINY: dict[str, Callable[[Path], None]] = {
    "Stable Diffusion 1.x and 2.x": make_tiny,
    "Stable Diffusion XL": make_tiny_sdxl,
    "Stable Diffusion 3 and 3.5": make_tiny_sd3,
    "FLUX.1 dev": make_tiny_flux,
    "FLUX.1 schnell": partial(make_tiny_flux, schnell=True),
    "FLUX.2 klein": make_tiny_flux2_klein,
    "FLUX.2 dev": make_tiny_flux2_dev,
    "Qwen-Image": make_tiny_qwen_image,
    "Z-Image": make_tiny_z_image,
    "Chroma": make_tiny_chroma,
    "Lumina Image 2": make_tiny_lumina2,
    "Sana": make_tiny_sana,
    "AuraFlow": make_tiny_aura_flow,
    "HiDream": make_tiny_hidream,
    "Kolors": make_tiny_kolors,
    "CogView4": make_tiny_cogview4,
    "ERNIE-Image": make_tiny_ernie_image,
    "Krea 2": make_tiny_krea2,
    "Ideogram 4": make_tiny_ideogram4,
    "Kandinsky 5 (image)": make_tiny_kandinsky5,
    "Bria FIBO": make_tiny_bria_fibo,
}
"""A kind of model to what writes a tiny one into a folder; at least one of each family."""

__all__ = [
    "TINY",
    "make_tiny",
    "make_tiny_aura_flow",
    "make_tiny_bria_fibo",
    "make_tiny_chroma",
    "make_tiny_cogview4",
    "make_tiny_ernie_image",
    "make_tiny_flux",
    "make_tiny_flux2_dev",
    "make_tiny_flux2_klein",
    "make_tiny_hidream",
    "make_tiny_ideogram4",
    "make_tiny_kandinsky5",
    "make_tiny_kolors",
    "make_tiny_krea2",
    "make_tiny_lumina2",
    "make_tiny_qwen_image",
    "make_tiny_sana",
    "make_tiny_sd3",
    "make_tiny_sdxl",
    "make_tiny_z_image",
]
