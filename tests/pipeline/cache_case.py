"""A recipe for the photograph fixtures, with the tables that the cache stages read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.images.decode import hash_bytes, read_header
from pipeline.images.geometry import placement_of
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.reporting.reports import StageResult
from pipeline.storage.tables import Tables, frame


@dataclass
class Cache:
    """The inputs of a cache job; `rows`, `buckets` and `captions` scan the folder on each call."""

    recipe: Recipe
    photos: Path

    @property
    def tables(self) -> Tables:
        return Tables(self.recipe.output_dir)

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for path in sorted(self.photos.glob("*.png")):
            size = read_header(path).size
            rows.append(
                {
                    "sample_id": f"photos/{path.name}",
                    "dataset": "photos",
                    "path": path.name,
                    "content_hash": hash_bytes(path.read_bytes()),
                    "height": size.height,
                    "width": size.width,
                }
            )
        return rows

    def buckets(self) -> pl.DataFrame:
        placement = placement_of(self.recipe.buckets)
        table = []
        for row in self.rows():
            geometry = placement.assign_many([row["height"]], [row["width"]]).columns.one(0)
            columns = {
                "duplicate_group": row["content_hash"],
                "bucket": geometry.bucket,
                "resized_height": geometry.resized_size.height,
                "resized_width": geometry.resized_size.width,
                "crop_top": geometry.crop.top,
                "crop_left": geometry.crop.left,
                "target_height": geometry.target_size.height,
                "target_width": geometry.target_size.width,
                "crop_loss": geometry.crop_loss,
                "scale": geometry.scale,
            }
            table.append({**row, **columns})
        return frame("aspect_buckets", table)

    def captions(self) -> pl.DataFrame:
        """Return the columns of validated_dataset that text_embeddings reads."""
        rows_and_paths = [(row, self.photos / row["path"]) for row in self.rows()]
        return pl.DataFrame(
            [
                {
                    **row,
                    "caption": path.with_suffix(".txt").read_text(encoding="utf-8").strip(),
                    "more_captions": "[]",
                }
                for row, path in rows_and_paths
            ]
        )

    def with_settings(self, **sections: dict[str, Any]) -> Cache:
        return Cache(
            recipe_of(self.recipe.output_dir.parent, self.photos, self.recipe.model.base, **sections),
            self.photos,
        )

    def keep(self, asset: str, result: StageResult) -> StageResult:
        """Write the table and the rejected rows, as the asset does, and return the result."""
        self.tables.write(asset, result.table)
        self.tables.write_rejected(asset, result.rejected)
        return result


def recipe_of(root: Path, photos: Path, base: str | Path, **sections: dict[str, Any]) -> Recipe:
    return recipe_from_mapping(
        "sample",
        {
            "datasets": [{"name": "photos", "path": str(photos)}],
            "cache_dir": str(root / "cache"),
            "output_dir": str(root / "out"),
            "model": {"base": str(base)},
            "buckets": {"resolution": 64, "step": 16},
            **sections,
        },
    )


@pytest.fixture
def cache(tmp_path: Path, photos: Path, tiny_sd: Path) -> Cache:
    return Cache(recipe_of(tmp_path, photos, tiny_sd), photos)


@pytest.fixture
def entry_bytes(cache: Cache) -> Callable[[], dict[str, bytes]]:
    """Return a function that reads the bytes of every entry, by its path relative to the cache."""

    def read() -> dict[str, bytes]:
        root = cache.recipe.cache_dir
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.safetensors")}

    return read
