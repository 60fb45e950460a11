"""Tiny models of every family with random weights, created offline for the demo and the tests.

They consist of the same classes as the real models and differ only in size. Their pictures are noise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from demo.tiny_models.anima import make_tiny_anima
from demo.tiny_models.aura_flow import make_tiny_aura_flow
from demo.tiny_models.bria_fibo import make_tiny_bria_fibo
from demo.tiny_models.bria_fibo2 import make_tiny_bria_fibo2
from demo.tiny_models.chroma import make_tiny_chroma
from demo.tiny_models.cogview4 import make_tiny_cogview4
from demo.tiny_models.ernie_image import make_tiny_ernie_image
from demo.tiny_models.flux import make_tiny_flux, make_tiny_flux_kontext
from demo.tiny_models.flux2 import make_tiny_flux2_dev, make_tiny_flux2_klein
from demo.tiny_models.hidream import make_tiny_hidream
from demo.tiny_models.ideogram4 import make_tiny_ideogram4
from demo.tiny_models.kandinsky5 import make_tiny_kandinsky5
from demo.tiny_models.kolors import make_tiny_kolors
from demo.tiny_models.krea2 import make_tiny_krea2
from demo.tiny_models.lumina2 import make_tiny_lumina2
from demo.tiny_models.qwen_image import make_tiny_qwen_image, make_tiny_qwen_image_edit
from demo.tiny_models.qwen_image21 import make_tiny_qwen_image21
from demo.tiny_models.sana import make_tiny_sana
from demo.tiny_models.sd import make_tiny
from demo.tiny_models.sd3 import make_tiny_sd3
from demo.tiny_models.sdxl import make_tiny_sdxl
from demo.tiny_models.wan import make_tiny_wan
from demo.tiny_models.z_image import make_tiny_z_image

TINY: dict[str, Callable[[Path], None]] = {
    "Stable Diffusion 1.x and 2.x": make_tiny,
    "Stable Diffusion XL": make_tiny_sdxl,
    "Stable Diffusion 3 and 3.5": make_tiny_sd3,
    "FLUX.1 dev": make_tiny_flux,
    "FLUX.1 schnell": partial(make_tiny_flux, schnell=True),
    "FLUX.1 Kontext": make_tiny_flux_kontext,
    "FLUX.2 klein": make_tiny_flux2_klein,
    "FLUX.2 dev": make_tiny_flux2_dev,
    "Qwen-Image": make_tiny_qwen_image,
    "Qwen-Image-Edit": make_tiny_qwen_image_edit,
    "Qwen-Image-Edit (first)": partial(make_tiny_qwen_image_edit, first=True),
    "Qwen-Image 2.1": make_tiny_qwen_image21,
    "Qwen-Image 2.1 Turbo": partial(make_tiny_qwen_image21, turbo=True),
    "Z-Image": make_tiny_z_image,
    "Z-Image Turbo": partial(make_tiny_z_image, turbo=True),
    "Chroma": make_tiny_chroma,
    "Lumina Image 2": make_tiny_lumina2,
    "Sana": make_tiny_sana,
    "AuraFlow": make_tiny_aura_flow,
    "HiDream": make_tiny_hidream,
    "Kolors": make_tiny_kolors,
    "CogView4": make_tiny_cogview4,
    "ERNIE-Image": make_tiny_ernie_image,
    "Krea 2": make_tiny_krea2,
    "Anima": make_tiny_anima,
    "Ideogram 4": make_tiny_ideogram4,
    "Kandinsky 5 (image)": make_tiny_kandinsky5,
    "Bria FIBO": make_tiny_bria_fibo,
    "Bria FIBO 2": make_tiny_bria_fibo2,
    "Wan 2.1 (image)": make_tiny_wan,
}
"""Functions that write a tiny model into a folder, by kind of model; at least one for each family."""

__all__ = [
    "TINY",
    "make_tiny",
    "make_tiny_anima",
    "make_tiny_aura_flow",
    "make_tiny_bria_fibo",
    "make_tiny_bria_fibo2",
    "make_tiny_chroma",
    "make_tiny_cogview4",
    "make_tiny_ernie_image",
    "make_tiny_flux",
    "make_tiny_flux2_dev",
    "make_tiny_flux2_klein",
    "make_tiny_flux_kontext",
    "make_tiny_hidream",
    "make_tiny_ideogram4",
    "make_tiny_kandinsky5",
    "make_tiny_kolors",
    "make_tiny_krea2",
    "make_tiny_lumina2",
    "make_tiny_qwen_image",
    "make_tiny_qwen_image21",
    "make_tiny_qwen_image_edit",
    "make_tiny_sana",
    "make_tiny_sd3",
    "make_tiny_sdxl",
    "make_tiny_wan",
    "make_tiny_z_image",
]
