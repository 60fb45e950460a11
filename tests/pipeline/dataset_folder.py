"""A dataset folder with the stages up to aspect_buckets, without a model."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.reporting.reports import StageResult, write_report
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.stage import validate


def picture(seed: int = 0, height: int = 24, width: int = 40, kind: str = "PNG") -> bytes:
    """Return the bytes of a small image of random pixels, which depend only on the seed and the size."""
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(levels).save(file, kind)
    return file.getvalue()


@dataclass
class Folder:
    """A dataset folder, its recipe, and the stages up to aspect_buckets; tests use the fixture `folder`."""

    root: Path
    output_dir: Path
    captions: dict[str, object] = field(default_factory=dict[str, object])
    dataset: dict[str, object] = field(default_factory=dict[str, object])
    checks: dict[str, object] = field(default_factory=dict[str, object])
    log: list[str] = field(default_factory=list[str])
    duplicates: str = "keep_first"
    validation_fraction: float = 0.0
    model: str = "no model"

    @property
    def recipe(self) -> Recipe:
        return recipe_from_mapping(
            "small",
            {
                "datasets": [
                    {
                        "name": "d",
                        "path": str(self.root),
                        "captions": self.captions,
                        "duplicates": self.duplicates,
                        "validation_fraction": self.validation_fraction,
                        **self.dataset,
                    }
                ],
                "cache_dir": str(self.output_dir / "cache"),
                "output_dir": str(self.output_dir),
                "model": {"base": self.model},
                "buckets": {"resolution": 64, "step": 8},
                "checks": self.checks,
            },
        )

    @property
    def tables(self) -> Tables:
        return Tables(self.output_dir)

    @staticmethod
    def picture(seed: int = 0, height: int = 24, width: int = 40, kind: str = "PNG") -> bytes:
        return picture(seed, height, width, kind)

    def add(self, name: str, data: bytes | None = None, caption: str | bytes | None = "a caption") -> Path:
        """Write an image and its sidecar caption; by default the file's name is the seed of its pixels."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(sum(os.fsencode(name))) if data is None else data)
        if caption is not None:
            text = caption if isinstance(caption, bytes) else caption.encode()
            path.with_suffix(".txt").write_bytes(text)
        return path

    def scan(self) -> StageResult:
        return self._written("raw_images", scan(self.recipe, self.tables, log=self.log.append))

    def validate(self) -> StageResult:
        raw = self.tables.read("raw_images")
        result = validate(self.recipe, raw, self.tables, log=self.log.append)
        return self._written("validated_dataset", result)

    def assign(self) -> StageResult:
        result = assign_buckets(self.recipe, self.tables.read("validated_dataset"), log=self.log.append)
        return self._written("aspect_buckets", result)

    def ingest(self) -> StageResult:
        self.scan()
        return self.validate()

    def _written(self, asset: str, result: StageResult) -> StageResult:
        self.tables.write(asset, result.table)
        self.tables.write_rejected(asset, result.rejected)
        write_report(self.output_dir, asset, result.report)
        return result
