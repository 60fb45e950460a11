"""Samples of a recipe, and the keys and run ids that its settings give them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import polars as pl
import pytest

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.storage.tables import SCHEMAS, frame
from pipeline.text_embeddings.caption_rows import caption_variants
from pipeline.trained_lora.fingerprint import run_id
from pipeline.trained_lora.identities import planned_run
from pipeline.trained_lora.inputs import training_inputs
from tests.pipeline.recipe_effects import Values, merged

SIZES_HW = [(40, 48), (60, 200), (110, 130), (200, 64), (96, 96), (140, 90)]
"""Original sizes of the images: one smaller than its bucket, and both orientations."""


@dataclass(frozen=True)
class Ids:
    """Everything that a recipe's settings decide about its cache and its run."""

    latents: tuple[str, ...]
    text: tuple[str, ...]
    run: str


class Samples:
    """Rows of validated_dataset, and the keys and run ids that recipes give them. Nothing is encoded."""

    def __init__(self, folder: Path, base: Path, other_base: Path) -> None:
        self.paths = {
            "@folder@": str(folder),
            "@other_base@": str(other_base),
            "@lora_file@": str(folder / "lora.safetensors"),
        }
        (folder / "lora.safetensors").write_bytes(b"weights")
        self.values = {
            "datasets": [{"name": "photos", "path": str(folder / "photos")}],
            "cache_dir": str(folder / "cache"),
            "output_dir": str(folder / "out"),
            "model": {"base": str(base)},
            "buckets": {"resolution": 64, "step": 32},
            "training": {"steps": 1000},
        }
        rows = [
            {
                "sample_id": f"photos/{number}.png",
                "dataset": "photos",
                "path": f"{number}.png",
                "content_hash": hashlib.sha256(bytes([number])).hexdigest(),
                "duplicate_group": hashlib.sha256(bytes([number])).hexdigest(),
                "height": height,
                "width": width,
                "caption": f"photograph {number}",
                "more_captions": json.dumps([f"picture {number}"]),
            }
            for number, (height, width) in enumerate(SIZES_HW)
        ]
        columns = SCHEMAS["validated_dataset"].items()
        blank = {name: "" if kind == pl.String else 0 for name, kind in columns}
        self.validated = frame("validated_dataset", [blank | row for row in rows])

    def recipe(self, values: Values) -> Recipe:
        """Return the recipe with some other values; `resolutions` and `sizes` replace the resolution."""
        text = json.dumps(merged(self.values, values))
        for name, path in self.paths.items():
            text = text.replace(name, path)
        return recipe_from_mapping("demo", json.loads(text))

    def tables(self, entries: RecipeEntries, validated: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the columns of vae_latents and text_embeddings that decide keys and run ids."""
        buckets = assign_buckets(entries.recipe, validated, log=lambda line: None).table
        text = caption_variants(validated).with_columns(text_length=pl.lit(77))
        keys = pl.Series("key", entries.text_keys(text["caption"]))
        return entries.latent_requests(buckets), text.with_columns(keys)

    def ids(self, values: Values, validated: pl.DataFrame | None = None) -> Ids:
        """Return the keys and the run id of a recipe with these values."""
        entries = RecipeEntries(self.recipe(values))
        latents, text = self.tables(entries, self.validated if validated is None else validated)
        named = training_inputs(entries.recipe, entries, latents, text)
        _, _, facts = planned_run(entries, named, latents)
        return Ids(tuple(latents["key"]), tuple(entries.text_keys(text["caption"])), run_id(facts))

    @cached_property
    def unchanged(self) -> Ids:
        """Keys and run id of the recipe without other values."""
        return self.ids({})


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory, tiny_sd: Path, tiny_sdxl: Path) -> Samples:
    return Samples(tmp_path_factory.mktemp("samples"), tiny_sd, tiny_sdxl)
