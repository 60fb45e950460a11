"""Reference images from file to LoRA: nothing starts without each of them; an edited one is encoded alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from diffusers import Flux2KleinPipeline
from PIL import Image

from demo.tiny_models import make_tiny_flux2_klein
from tests.e2e.pairs import NUM_PAIRS, closed_gates, preview_references, write_pairs
from tests.e2e.workspace import Workspace


@pytest.fixture
def pairs(tmp_path: Path) -> Workspace:
    """A workspace with 12 pairs and a tiny FLUX.2 klein."""
    make_tiny_flux2_klein(tmp_path / "model")
    workspace = write_pairs(tmp_path)
    dataset = {
        "name": "photos",
        "path": str(workspace.data),
        "references": [{"path": str(tmp_path / "before")}],
    }
    training = {"steps": 4, "batch_size": 2, "learning_rate": 1e-1, "sample_every": 4, "lora": {"rank": 4}}
    workspace.recipe(
        datasets=[dataset], buckets={"resolution": 64, "step": 16}, latents={"flip": True}, training=training
    )
    return workspace


def edited(pipe: Any, reference: Path) -> np.ndarray:
    with Image.open(reference) as image:
        generator = torch.Generator().manual_seed(0)
        arguments = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np"}
        return pipe(prompt="make it dark", image=[image], generator=generator, **arguments).images[0]


@pytest.mark.slow
def test_E01_E03_a_missing_reference_stops_the_job_and_the_repaired_one_trains_a_lora_that_edits(
    pairs: Workspace,
) -> None:
    before = pairs.root / "before"
    shutil.move(before / "7.webp", pairs.root / "7.webp")
    assert not pairs.execute("train").success
    assert "photos/7.png" in closed_gates(pairs, "validated_dataset")["references_present"]
    rejected = pl.read_parquet(pairs.out / "tables" / "rejected.parquet")
    assert rejected.select("sample_id", "reason").rows() == [("photos/7.png", "reference_missing")]
    assert pairs.entries("latents") == []
    assert not (pairs.out / "runs").exists()

    shutil.move(pairs.root / "7.webp", before / "7.webp")
    assert pairs.execute("train").success
    report = pairs.report("vae_latents")
    assert (report["encoded"], report["reference_entries"]) == (4 * NUM_PAIRS, 2 * NUM_PAIRS)
    (run,) = pairs.out.glob("runs/*/run.json")
    assert preview_references(run.parent) == {"0.webp"}
    assert "references" in json.loads(run.read_text("utf-8"))["samples"]
    provenance = json.loads((pairs.out / "lora" / "provenance.json").read_text("utf-8"))
    assert len(provenance["samples"]["references"]) == NUM_PAIRS

    pipe = Flux2KleinPipeline.from_pretrained(pairs.model)
    pipe.set_progress_bar_config(disable=True)
    without = edited(pipe, before / "1.webp")
    pipe.load_lora_weights(pairs.out / "lora")
    assert np.abs(edited(pipe, before / "1.webp") - without).max() > 0.01

    with Image.open(before / "3.webp") as image:
        image.transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(before / "3.webp", lossless=True)
    assert pairs.execute("cache").success
    report = pairs.report("vae_latents")
    assert (report["encoded"], report["removed"]) == (2, 2)
