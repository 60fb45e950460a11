"""Tiny base models with a recipe, photographs and a filled cache, for tests that run the stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from bench.gpu.models import MODELS
from bench.gpu.rig import TINY, Bench, Rig

NUM_IMAGES = 4


def tiny_rigs(folder: Path, device: str, *, edge_px: int = 64) -> Callable[[str], Rig]:
    """Return a function that returns a rig by its model's name; images are squares of noise."""
    scale = replace(TINY, images=NUM_IMAGES, steps=4, resolution=edge_px)
    bench = Bench(folder, device, scale)
    photos = bench.folder / "photos"
    photos.mkdir()
    random = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        pixels = random.integers(0, 256, (edge_px, edge_px, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(photos / f"{number}.png")
        (photos / f"{number}.txt").write_text(f"picture {number}\n", encoding="utf-8")
    return lambda name: bench.rig(next(model for model in MODELS if model.name == name), "cached")
