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
from tests.e2e.conftest import Workspace

NUM_PAIRS = 12


@pytest.fixture
def pairs(tmp_path: Path) -> Workspace:
    """A workspace with 12 pairs of image and reference, of which 4 are landscape, and a tiny FLUX.2 klein."""
    make_tiny_flux2_klein(tmp_path / "model")
    workspace = Workspace(tmp_path, tmp_path / "model")
    workspace.data.mkdir()
    (tmp_path / "before").mkdir()
    for index in range(NUM_PAIRS):
        coarse = np.random.default_rng(index).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        width = 96 if index % 3 == 0 else 64
        image = Image.fromarray(coarse).resize((width, 64), Image.Resampling.BICUBIC)
        image.save(workspace.data / f"{index}.png")
        (workspace.data / f"{index}.txt").write_text("make it dark\n", encoding="utf-8")
        image.resize((width + 16, 80)).save(tmp_path / "before" / f"{index}.webp", lossless=True)
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


def closed_gates(workspace: Workspace, asset: str) -> dict[str, str]:
    checks = workspace.report(f"{asset}_checks")["checks"]
    return {check["name"]: check["summary"] for check in checks if check["closed"]}


def preview_references(run_folder: Path) -> set[str]:
    """Return the references that the previews of the only prompt state."""
    found: set[str] = set()
    for path in run_folder.rglob("*.png"):
        with Image.open(path) as image:
            if image.info.get("prompt") == "make it dark":
                found.add(image.info["references"])
    return found


def edited(pipe: Any, reference: Path) -> np.ndarray:
    with Image.open(reference) as image:
        generator = torch.Generator().manual_seed(0)
        arguments = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np"}
        return pipe(prompt="make it dark", image=[image], generator=generator, **arguments).images[0]


def test_E01_a_missing_reference_stops_the_job_and_the_repaired_one_trains_a_lora_that_edits(
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
