"""Seeded inputs: photographs derived from scikit-image's, many tiny files, and a project that uses them."""

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
"""Colour photographs in the scikit-image package."""

MIN_PX, MAX_PX = 300_000, 12_000_000


def photographs(folder: Path, count: int, *, max_px: int = MAX_PX, seed: int = 0) -> list[Path]:
    """Write `count` JPEGs of 0.3 MP to `max_px` and aspect ratio 0.4 to 2.5, each with a caption file.

    They are scaled crops of the bundled photographs. Areas and aspect ratios are log-uniform.
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
    """Write `count` PNGs of 16x16 random pixels, 1,000 per folder, each with a caption file.

    There are at most `num_captions` distinct captions.
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
    """A recipe in a separate folder, with methods that run its stages as the assets do."""

    recipe: Recipe

    @classmethod
    def at(cls, folder: Path, dataset: Path, *, base: Path | None = None, resolution: int = 512) -> Project:
        """Return a project for the dataset, with cache and output below `folder`."""
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
        """Tables of the recipe."""
        return Tables(self.recipe.output_dir)

    def table(self, asset: str, stage: str) -> pl.DataFrame:
        """Return the columns of an asset's last table that `stage` needs."""
        return self.tables.read(asset, needed_columns(stage, asset))

    def scan(self) -> StageResult:
        """Run raw_images."""
        return self._stored("raw_images", scan(self.recipe, self.tables, log=_silent))

    def validate(self) -> StageResult:
        """Run validated_dataset on the last scan."""
        raw = self.table("raw_images", "validated_dataset")
        return self._stored("validated_dataset", validate(self.recipe, raw, self.tables, log=_silent))

    def buckets(self) -> StageResult:
        """Run aspect_buckets on the last validation."""
        rows = self.tables.read("validated_dataset")
        return self._stored("aspect_buckets", assign_buckets(self.recipe, rows, log=_silent))

    def latents(self) -> StageResult:
        """Run vae_latents on the last buckets, in launched processes."""
        return self._cached("vae_latents", cache_latents, self.tables.read("aspect_buckets"))

    def text(self) -> StageResult:
        """Run text_embeddings on the last validation, in launched processes."""
        return self._cached("text_embeddings", cache_text, self.tables.read("validated_dataset"))

    def training(self) -> StageResult:
        """Run trained_lora on the last latents and text embeddings, in launched processes."""
        latents, text = (self.table(asset, "trained_lora") for asset in ("vae_latents", "text_embeddings"))
        launch = LocalLaunch(self.recipe.accelerate)
        return self._stored(
            "trained_lora", train_lora(self.recipe, latents, text, launch=launch, log=_silent)
        )

    def _cached(self, asset: str, stage: Callable[..., StageResult], rows: pl.DataFrame) -> StageResult:
        launch = LocalLaunch(self.recipe.accelerate)
        return self._stored(asset, stage(self.recipe, rows, self.tables, launch=launch, log=_silent))

    def _stored(self, asset: str, result: StageResult) -> StageResult:
        self.tables.write(asset, result.table)
        return result


def _silent(line: str) -> None:
    """Discard a log line of a stage."""


def _box(
    size: tuple[int, int], aspect: float, random: np.random.Generator
) -> tuple[float, float, float, float]:
    """Return a random crop of the given aspect ratio as (left, upper, right, lower)."""
    width, height = size
    wide = min(width, height * aspect)
    high = min(height, wide / aspect)
    left, upper = random.uniform(0, width - wide), random.uniform(0, height - high)
    return left, upper, left + wide, upper + high
