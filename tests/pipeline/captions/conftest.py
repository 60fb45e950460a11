from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image

from demo.tiny_models.captioners import (
    write_blip,
    write_blip2,
    write_florence2,
    write_idefics3,
    write_qwen2_5_vl,
    write_qwen3_vl,
    write_smolvlm,
)
from demo.tiny_models.tagger import write_tagger
from pipeline.captions.stage import ASSET, caption_images
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.storage.tables import Tables
from tests.in_process_worker import InProcessLaunch

WRITERS = {
    "idefics3": write_idefics3,
    "blip": write_blip,
    "blip2": write_blip2,
    "florence2": write_florence2,
    "smolvlm": write_smolvlm,
    "qwen2_5_vl": write_qwen2_5_vl,
    "qwen3_vl": write_qwen3_vl,
    "tagger": write_tagger,
}


@pytest.fixture(scope="session")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny captioning model, which is written once per process."""
    top = tmp_path_factory.mktemp("captioners")

    def folder(name: str) -> Path:
        if not (top / name).is_dir():
            (top / name).mkdir()
            WRITERS[name](top / name)
        return top / name

    return folder


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


class Captioned:
    """A dataset of three images whose captions a tiny model writes in this process."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.images = folder / "photos"
        self.images.mkdir()
        self.folder = folder
        self.captions: dict[str, Any] = {"from": "model", "model": str(model), "max_tokens": 8}
        for seed, name in enumerate(("a", "b", "c")):
            picture(seed).save(self.images / f"{name}.png")

    def recipe(self, **captions: Any) -> Recipe:
        values = {
            "datasets": [
                {"name": "photos", "path": str(self.images), "captions": {**self.captions, **captions}}
            ],
            "cache_dir": str(self.folder / "cache"),
            "output_dir": str(self.folder / "output"),
            "model": {"base": "owner/name"},
        }
        return recipe_from_mapping("flowers", values)

    def raw(self, recipe: Recipe) -> pl.DataFrame:
        return scan(recipe, Tables(recipe.output_dir), log=lambda _: None).table

    def run(self, **captions: Any) -> tuple[pl.DataFrame, dict[str, Any], list[str]]:
        """Return the table, the report, and the modules that were launched."""
        recipe, launch = self.recipe(**captions), InProcessLaunch()
        tables = Tables(recipe.output_dir)
        result = caption_images(recipe, self.raw(recipe), tables, launch=launch, log=lambda _: None)
        tables.write(ASSET, result.table)
        return result.table, dict(result.report), launch.modules


@pytest.fixture
def captioned(tmp_path: Path, captioner: Callable[[str], Path]) -> Captioned:
    return Captioned(tmp_path, captioner("idefics3"))
