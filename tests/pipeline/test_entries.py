from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.entries import Entries, recorded_stat, stat_columns
from pipeline.recipe import recipe_from_mapping
from pipeline.store import EntryStat

ROW: dict[str, Any] = {
    "sample_id": "photos/a.png",
    "content_hash": "ab" * 32,
    "height": 100,
    "width": 150,
    "resized_height": 64,
    "resized_width": 96,
    "crop_top": 0,
    "crop_left": 8,
    "target_height": 64,
    "target_width": 80,
}


def entries(base: Path, root: Path, **sections: dict[str, Any]) -> Entries:
    fields = {
        "datasets": [{"name": "photos", "path": str(root / "photos")}],
        "cache_dir": str(root / "cache"),
        "output_dir": str(root / "out"),
        "model": {"base": str(base)},
    }
    return Entries(recipe_from_mapping("sample", fields | sections))


def test_an_images_entry_has_the_shape_of_its_target_size(tiny_sd: Path, tmp_path: Path) -> None:
    spec = entries(tiny_sd, tmp_path).latent(ROW)
    assert (spec.kind, len(spec.key)) == ("latents", 64)
    assert {name: (t.dtype, t.shape) for name, t in spec.tensors.items()} == {
        "latent": ("float16", (4, 8, 10))
    }


def test_L04_what_decides_a_latent_changes_its_key(tiny_sd: Path, tmp_path: Path) -> None:
    base = entries(tiny_sd, tmp_path)
    keys = {base.latent(ROW).key}
    for name in ("resized_height", "resized_width", "crop_top", "crop_left"):
        keys.add(base.latent({**ROW, name: ROW[name] + 1}).key)
    keys.add(base.latent({**ROW, "target_height": 72}).key)
    keys.add(base.latent({**ROW, "target_width": 72}).key)
    keys.add(base.latent({**ROW, "content_hash": "cd" * 32}).key)
    for latents in (
        {"dtype": "float32"},
        {"compute_dtype": "bfloat16"},
        {"posterior": "mean"},
        {"background": [0, 0, 0]},
    ):
        keys.add(entries(tiny_sd, tmp_path, latents=latents).latent(ROW).key)
    other = shutil.copytree(tiny_sd, tmp_path / "other")
    config = json.loads((other / "vae" / "config.json").read_text())
    (other / "vae" / "config.json").write_text(json.dumps({**config, "scaling_factor": 0.2}))
    keys.add(entries(other, tmp_path).latent(ROW).key)
    assert len(keys) == 13


@pytest.mark.parametrize(
    "sections",
    [
        {"training": {"batch_size": 7, "steps": 3, "seed": 1}},
        {"accelerate": {"num_processes": 3}},
        {"text": {"dtype": "float32"}},
        {"buckets": {"resolution": 512}},
        {"checks": {"max_rejected_fraction": 0.5}},
    ],
    ids=lambda sections: next(iter(sections)),
)
def test_L04_what_does_not_decide_a_latent_leaves_its_key(
    tiny_sd: Path, tmp_path: Path, sections: dict[str, Any]
) -> None:
    renamed = {**ROW, "sample_id": "elsewhere/b.png", "path": "b.png", "height": 101}
    base = entries(tiny_sd, tmp_path)
    assert entries(tiny_sd, tmp_path / "moved", **sections).latent(renamed).key == base.latent(ROW).key


def test_L15_T01_a_moved_base_model_keeps_all_keys_and_another_part_of_it_only_its_own(
    tiny_sd: Path, tmp_path: Path
) -> None:
    base = entries(tiny_sd, tmp_path)
    other = shutil.copytree(tiny_sd, tmp_path / "other")
    moved = entries(other, tmp_path)
    assert moved.latent(ROW).key == base.latent(ROW).key
    assert moved.text("a cat").key == base.text("a cat").key
    assert moved.fingerprint("denoiser") == base.fingerprint("denoiser")
    for file in ("tokenizer/merges.txt", "text_encoder/config.json"):
        path = other / file
        text = path.read_text(encoding="utf-8")
        path.write_text(
            text.replace("#version: 0.2", "#version: 0.3").replace("quick_gelu", "gelu"), encoding="utf-8"
        )
        changed = entries(other, tmp_path)
        assert changed.text("a cat").key != base.text("a cat").key, file
        assert changed.latent(ROW).key == base.latent(ROW).key
        path.write_text(text, encoding="utf-8")


def test_a_stat_is_found_again_in_its_columns() -> None:
    stat = EntryStat(1, 2, 3, 4)
    assert recorded_stat(stat_columns(stat)) == stat
