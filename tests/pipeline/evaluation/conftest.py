"""A finished run with a holdout, whose images are files."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from pipeline.storage.tables import Tables
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.conftest import any_precision, one_thread
from tests.pipeline.trained_lora.project import PROMPTS, Project, project_in
from tests.pipeline.trained_lora.runs import run

__all__ = ["any_precision", "one_thread"]


@pytest.fixture(scope="session")
def evaluated_once(tmp_path_factory: pytest.TempPathFactory, tiny_bases: dict[str, Path]) -> Project:
    """Train 4 steps with LoRAs of the steps 2 and 4; some images are held out."""
    project = project_in(
        tmp_path_factory.mktemp("evaluated"),
        tiny_bases,
        sizes={"64x64": 8, "32x96": 4},
        datasets={"photos": {"validation_fraction": 0.4}},
        steps=4,
        checkpoint_every=2,
        gradient_accumulation=1,
        learning_rate=0.1,
        sample_prompts=PROMPTS,
    )
    run(project, InProcessLaunch())
    _write_images(project)
    return project


@pytest.fixture
def trained(evaluated_once: Project, tmp_path: Path) -> Project:
    """Return a copy of the project; tests may change its outputs, its cache and its images."""
    root = tmp_path / "project"
    shutil.copytree(evaluated_once.recipe.output_dir.parent, root)
    (dataset,) = evaluated_once.recipe.datasets
    update = {
        "output_dir": root / "output",
        "output_address": root / "output",
        "cache_dir": root / "cache",
        "datasets": (dataset.model_copy(update={"path": root / "photos"}),),
    }
    recipe = evaluated_once.recipe.model_copy(update=update)
    return Project(recipe, evaluated_once.latents, evaluated_once.text)


def _write_images(project: Project) -> None:
    """Write an image of the recorded size for each sample, and record its hash in vae_latents."""
    (dataset,) = project.recipe.datasets
    hashes: dict[str, str] = {}
    for row in project.latents.iter_rows(named=True):
        rng = np.random.default_rng(len(hashes))
        colour = rng.integers(0, 256, 3, np.uint8)
        noise = rng.integers(0, 64, (row["height"], row["width"], 3), np.uint8)
        file = Path(str(dataset.path)) / row["path"]
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.clip(noise.astype(int) + colour, 0, 255).astype(np.uint8)).save(file, "PNG")
        hashes[row["sample_id"]] = hashlib.sha256(file.read_bytes()).hexdigest()
    tables = Tables(project.recipe.output_dir)
    table = tables.read("vae_latents")
    content_hash = pl.col("sample_id").replace_strict(hashes, return_dtype=pl.String)
    tables.write("vae_latents", table.with_columns(content_hash=content_hash))
