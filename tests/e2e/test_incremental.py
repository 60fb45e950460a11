"""The second run computes only what has changed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from dagster import AssetKey, AssetSelection

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


def test_unchanged_files_keep_all_data_versions_and_an_edited_caption_encodes_one_text(cached) -> None:
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
    assert counts(cached, "vae_latents") == (0, 5, 0, 0)
    assert cached.report("text_embeddings")["encoded"] == 1


def test_training_needs_only_the_cache_and_is_not_repeated(cached) -> None:
    def weights() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (cached.out / "runs").rglob("*.safetensors")}

    training = AssetSelection.assets(AssetKey(["small", "trained_lora"]))
    shutil.rmtree(cached.data)
    assert cached.select(training).success
    assert cached.report("trained_lora")["steps"] == 4
    assert {path.name for path in (cached.out / "lora").glob("*.safetensors")} == {
        "pytorch_lora_weights.safetensors",
        "small_comfyui.safetensors",
        "small_kohya.safetensors",
    }
    before = weights()
    assert len(before) >= 3

    assert cached.select(training).success
    assert weights() == before
    assert not cached.data.exists()
