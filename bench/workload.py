"""Seeded work: photographs made from scikit-image's, many tiny files, and a project around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from PIL import Image

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.processes.launch import LocalLaunch
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.reporting.reports import StageResult
from pipeline.storage.needed_columns import needed_columns
from pipeline.storage.tables import Tables
from pipeline.text_embeddings.stage import cache_text
from pipeline.trained_lora.stage import train_lora
from pipeline.vae_latents.stage import cache_latents
from pipeline.validated_dataset.stage import validate

BUNDLED = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png")
"""Colour photographs inside the scikit-image package."""

MIN_PX, MAX_PX = 300_000, 12_000_000


def photographs(folder: Path, count: int, *, max_px: int = MAX_PX, seed: int = 0) -> list[Path]:
    """`count` JPEGs of 0.3 MP to `max_px` and aspect ratio 0.4 to 2.5, each with a caption file.

    Crops of the bundled photographs, scaled; sizes are log-uniform.
    """
    import skimage

    bundled = Path(skimage.__file__).parent / "data"
    sources = [Image.open(bundled / name).convert("RGB") for name in BUNDLED]
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    paths = list[Path]()
    for number in range(count):
        aspect = float(np.exp(random.uniform(np.log(0.4), np.log(2.5))))
        area = float(np.exp(random.uniform(np.log(MIN_PX), np.log(max_px))))
        size = (round((area * aspect) ** 0.5), round((area / aspect) ** 0.5))
        source = sources[number % len(sources)]
        box = _box(source.size, aspect, random)
        path = folder / f"{number:06}.jpg"
        source.resize(size, Image.Resampling.BICUBIC, box=box).save(path, quality=90)
        path.with_suffix(".txt").write_text(f"photograph number {number}\n", encoding="utf-8")
        paths.append(path)
    return paths


def tiny_files(folder: Path, count: int, *, num_captions: int = 1000, seed: int = 0) -> list[Path]:
    """`count` PNGs of 16x16 random pixels, 1,000 a folder, each with a caption file.

    There are `num_captions` distinct captions.
    """
    random = np.random.default_rng(seed)
    paths = list[Path]()
    for number in range(count):
        place = folder / f"{number // 1000:04}"
        if number % 1000 == 0:
            place.mkdir(parents=True)
        path = place / f"{number:06}.png"
        pixels = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path, compress_level=0)
        path.with_suffix(".txt").write_text(f"caption {number % num_captions}\n", encoding="utf-8")
        paths.append(path)
    return paths


@dataclass(frozen=True)
class Project:
    """A recipe in a folder of its own, whose stages run as the assets run them."""

    recipe: Recipe

    @classmethod
    def at(cls, folder: Path, dataset: Path, *, base: Path | None = None, resolution: int = 512) -> Project:
        """Of the dataset, with cache and output below `folder`."""
        values = {
            "datasets": [{"name": "photos", "path": str(dataset)}],
            "cache_dir": str(folder / "cache"),
            "output_dir": str(folder / "out"),
            "model": {"base": str(base or "none/needed")},
            "buckets": {"resolution": resolution, "step": 64 if resolution >= 256 else 8},
        }
        return cls(recipe_from_mapping("bench", values))

    @property
    def tables(self) -> Tables:
        """The recipe's tables."""
        return Tables(self.recipe.output_dir)

    def table(self, asset: str, stage: str) -> pl.DataFrame:
        """Of an asset's last table what `stage` needs."""
        return self.tables.read(asset, needed_columns(stage, asset))

    def scan(self) -> StageResult:
        """raw_images."""
        return self._kept("raw_images", scan(self.recipe, self.tables, log=_silent))

    def validate(self) -> StageResult:
        """validated_dataset, from the last scan."""
        raw = self.table("raw_images", "validated_dataset")
        return self._kept("validated_dataset", validate(self.recipe, raw, self.tables, log=_silent))

    def buckets(self) -> StageResult:
        """aspect_buckets, from the last validation."""
        rows = self.tables.read("validated_dataset")
        return self._kept("aspect_buckets", assign_buckets(self.recipe, rows, log=_silent))

    def latents(self) -> StageResult:
        """vae_latents, in launched processes, from the last buckets."""
        return self._cached("vae_latents", cache_latents, self.tables.read("aspect_buckets"))

    def text(self) -> StageResult:
        """text_embeddings, in launched processes, from the last validation."""
        return self._cached("text_embeddings", cache_text, self.tables.read("validated_dataset"))

    def training(self) -> StageResult:
        """trained_lora, in launched processes, from the last latents and text embeddings."""
        latents, text = (self.table(asset, "trained_lora") for asset in ("vae_latents", "text_embeddings"))
        launch = LocalLaunch(self.recipe.accelerate)
        return self._kept("trained_lora", train_lora(self.recipe, latents, text, launch=launch, log=_silent))

    def _cached(self, asset: str, stage: Callable[..., StageResult], rows: pl.DataFrame) -> StageResult:
        launch = LocalLaunch(self.recipe.accelerate)
        return self._kept(asset, stage(self.recipe, rows, self.tables, launch=launch, log=_silent))

    def _kept(self, asset: str, result: StageResult) -> StageResult:
        self.tables.write(asset, result.table)
        return result


def _silent(line: str) -> None:
    """Stage logs are no part of a figure."""


def _box(
    size: tuple[int, int], aspect: float, random: np.random.Generator
) -> tuple[float, float, float, float]:
    """A crop of the given aspect ratio, at a random place: (left, upper, right, lower)."""
    width, height = size
    wide = min(width, height * aspect)
    high = min(height, wide / aspect)
    left, upper = random.uniform(0, width - wide), random.uniform(0, height - high)
    return left, upper, left + wide, upper + high
