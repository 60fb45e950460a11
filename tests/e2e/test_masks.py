"""Masks from file to LoRA: existing latents are reused, and nothing is trained without a mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from dagster import AssetKey, AssetSelection
from PIL import Image

from tests.e2e.workspace import Workspace


@pytest.fixture
def masked(cached: Workspace) -> Workspace:
    """A workspace with the cache of a recipe without masks, whose recipe now has masks in a subfolder."""
    (cached.data / "masks").mkdir()
    for number, path in enumerate(sorted(cached.data.glob("*.png"))):
        with Image.open(path) as image:
            mask = Image.new("L", image.size, number)
        mask.paste(255, (0, 0, mask.width // 2, mask.height))
        mask.save(cached.data / "masks" / path.name)
    dataset = {"name": "photos", "path": str(cached.data), "mask": {"path": str(cached.data / "masks")}}
    cached.recipe(datasets=[dataset])
    return cached


def closed_gates(workspace: Workspace, asset: str) -> set[str]:
    return {check["name"] for check in workspace.report(f"{asset}_checks")["checks"] if check["closed"]}


def run_facts(workspace: Workspace) -> dict[str, Any]:
    (path,) = workspace.out.glob("runs/*/run.json")
    return json.loads(path.read_text(encoding="utf-8"))


def test_masks_are_added_to_a_cache_and_trained(masked: Workspace) -> None:
    result = masked.execute("train")
    assert result.success
    num_samples = len(list(masked.data.glob("*.png")))
    report = masked.report("vae_latents")
    assert (report["encoded"], report["masks_encoded"], report["masked_samples"]) == (
        0,
        num_samples,
        num_samples,
    )
    assert len(masked.entries("masks")) == num_samples
    assert (masked.out / "lora" / "pytorch_lora_weights.safetensors").exists()
    facts = run_facts(masked)
    assert facts["loss"]["masks"] == {"photos": {"unmasked_weight": 0.0, "normalise": True}}
    assert "masks" in facts["samples"]


@pytest.mark.slow
def test_a_missing_mask_stops_the_job_and_a_lost_entry_stops_training(masked: Workspace) -> None:
    lost = masked.data / "masks" / "photo0.png"
    drawn = lost.read_bytes()
    lost.unlink()
    assert not masked.execute("cache").success
    assert "masks_present" in closed_gates(masked, "validated_dataset")
    rejected = pl.read_parquet(masked.out / "tables" / "rejected.parquet")
    assert rejected.select("sample_id", "reason").rows() == [("photos/photo0.png", "mask_missing")]
    assert masked.entries("masks") == []

    lost.write_bytes(drawn)
    assert masked.execute("cache").success
    entry: Path = masked.entries("masks")[0]
    entry.unlink()
    selection = AssetSelection.assets(AssetKey(["small", "trained_lora"])).without_checks()
    assert not masked.select(selection).success
    assert not (masked.out / "lora").exists()
