"""A small project with a complete cache: five photographs processed by the real stages."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.reporting.findings import CheckContext, Finding
from pipeline.reporting.reports import StageResult
from pipeline.storage.tables import Tables
from pipeline.text_embeddings import checks as text_embeddings
from pipeline.text_embeddings.stage import cache_text
from pipeline.vae_latents import checks as vae_latents
from pipeline.vae_latents.stage import cache_latents
from pipeline.validated_dataset.stage import validate
from tests.pipeline.reporting.row_columns import require_columns

ASSETS = ["vae_latents", "text_embeddings"]


@dataclass
class Job:
    """A project whose stages run in the calling process; `launch` starts the encoders."""

    recipe: Recipe
    launch: Any

    @property
    def tables(self) -> Tables:
        return Tables(self.recipe.output_dir)

    def keep(self, asset: str, result: StageResult) -> StageResult:
        self.tables.write(asset, result.table)
        self.tables.write_rejected(asset, result.rejected)
        return result

    def run(self) -> None:
        quiet = {"log": lambda _: None}
        raw = self.keep("raw_images", scan(self.recipe, self.tables, **quiet)).table
        validated = validate(self.recipe, raw, self.tables, **quiet)
        self.keep("validated_dataset", validated)
        self.keep("aspect_buckets", assign_buckets(self.recipe, validated.table, **quiet))
        self.cache()

    def run_with(self, entries: Path) -> None:
        """Run with a copy of these entries, or store those of this run there if there are none."""
        if entries.is_dir():
            shutil.copytree(entries, self.recipe.cache_dir)
        self.run()
        if not entries.is_dir():
            shutil.copytree(self.recipe.cache_dir, entries)

    def cache(self) -> None:
        buckets, validated = self.tables.read("aspect_buckets"), self.tables.read("validated_dataset")
        launch = {"launch": self.launch, "log": lambda _: None}
        self.keep("vae_latents", cache_latents(self.recipe, buckets, self.tables, **launch))
        self.keep("text_embeddings", cache_text(self.recipe, validated, self.tables, **launch))

    def failing(self, asset: str, recipe: Recipe | None = None) -> dict[str, Finding]:
        check = {"vae_latents": vae_latents.run, "text_embeddings": text_embeddings.run}[asset]
        findings = check(CheckContext(recipe or self.recipe, self.tables))
        require_columns(findings)
        return {finding.name: finding for finding in findings if not finding.passed}

    def entry(self, asset: str, sample: str = "photos/cat.png") -> Path:
        entries = RecipeEntries(self.recipe)
        row = self.tables.read(asset).row(by_predicate=pl.col("sample_id") == sample, named=True)
        spec = entries.latent_spec(row) if asset == "vae_latents" else entries.text_spec(row["caption"])
        return entries.store.path(spec)

    def changed(self, **sections: dict[str, Any]) -> Recipe:
        return recipe_of(self.recipe.output_dir.parent, self.recipe.model.base, **sections)


def recipe_of(root: Path, base: str | Path, **sections: Any) -> Recipe:
    fields = {
        "datasets": [{"name": "photos", "path": str(root / "photos")}],
        "cache_dir": str(root / "cache"),
        "output_dir": str(root / "out"),
        "model": {"base": str(base)},
        "buckets": {"resolution": 64, "step": 16},
    }
    return recipe_from_mapping("sample", fields | sections)
