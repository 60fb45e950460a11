"""The second run computes only what has changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]

IN_PROCESS = """
import json, sys
from assets.definitions import defs
result = defs().resolve_job_def("small_cache").execute_in_process(raise_on_error=False)
heavy = {"torch", "diffusers", "transformers", "accelerate", "peft"} & set(sys.modules)
print(json.dumps({"success": result.success, "heavy": sorted(heavy)}))
"""


def counts(workspace, asset: str) -> tuple[int, int, int, int]:
    report = workspace.report(asset)
    return report["encoded"], report["reused"], report["removed"], report["failed"]


def test_the_first_run_encodes_each_image_and_each_distinct_caption(cached_once) -> None:
    assert counts(cached_once, "vae_latents") == (5, 0, 0, 0)
    assert cached_once.report("text_embeddings")["encoded"] == 6
    assert len(cached_once.entries("latents")) == 5
    assert len(cached_once.entries("text")) == 6


def test_a_warm_run_encodes_nothing_and_imports_no_torch(cached) -> None:
    before = {path: path.stat().st_mtime_ns for path in cached.entries("latents") + cached.entries("text")}
    process = subprocess.run(
        [sys.executable, "-c", IN_PROCESS],
        env=cached.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(process.stdout.splitlines()[-1]) == {"success": True, "heavy": []}
    assert counts(cached, "vae_latents") == (0, 5, 0, 0)
    assert counts(cached, "text_embeddings")[0] == 0
    after = {path: path.stat().st_mtime_ns for path in cached.entries("latents") + cached.entries("text")}
    assert after == before


def test_an_edited_caption_encodes_one_text_embedding_and_no_latent(cached) -> None:
    (cached.data / "photo3.txt").write_text("another caption\n", encoding="utf-8")
    assert cached.execute("cache").success
    assert counts(cached, "vae_latents") == (0, 5, 0, 0)
    assert cached.report("text_embeddings")["encoded"] == 1


def test_L04_an_image_edited_in_place_encodes_one_latent(cached) -> None:
    file = cached.data / "photo2.png"
    size = file.stat().st_size
    with Image.open(file) as image:
        pixels = 255 - np.asarray(image)
    Image.fromarray(pixels).save(file, compress_level=0)
    assert file.stat().st_size == size
    assert cached.execute("cache").success
    assert counts(cached, "vae_latents")[:2] == (1, 4)
    assert cached.report("text_embeddings")["encoded"] == 0


def test_an_unchanged_run_keeps_the_data_version_of_every_asset(cached) -> None:
    def versions() -> dict[str, str]:
        result = cached.execute("cache")
        assert result.success
        return {
            event.asset_key.path[-1]: event.materialization.tags["dagster/data_version"]
            for event in result.get_asset_materialization_events()
        }

    first = versions()
    assert len(first) == 5
    (cached.data / "photo0.png").touch()
    assert versions() == first
    (cached.data / "photo0.txt").write_text("another caption\n", encoding="utf-8")
    after = versions()
    assert {name for name in first if first[name] != after[name]} == {"validated_dataset", "text_embeddings"}
