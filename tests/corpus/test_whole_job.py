"""The whole corpus and 20 good images in one folder, through the real job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from tests.corpus.corpus import all_cases, make
from tests.corpus.drawing import Case

ROOT = Path(__file__).parents[2]
CASES = all_cases()
RECIPE = """\
datasets: [{{name: d, path: {root}/photos, duplicates: keep_all}}]
cache_dir: {root}/cache
output_dir: {root}/out
model: {{base: {base}}}
buckets: {{resolution: 64, step: 16}}
training: {{steps: 2, batch_size: 4, sample_every: 0, lora: {{rank: 2}}}}
checks: {checks}
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("whole")
    good = [Case(f"good/{index:02}.png", photo(index)) for index in range(20)]
    make(made / "photos", [*CASES, *good])
    (made / "configs").mkdir()
    return made


def photo(seed: int):
    levels = np.random.default_rng(seed).integers(0, 256, (64 + seed, 80, 3), dtype=np.uint8)
    return lambda path: Image.fromarray(levels).save(path)


def run(root: Path, base: Path, checks: str) -> subprocess.CompletedProcess[str]:
    text = RECIPE.format(root=root, base=base, checks=checks)
    (root / "configs" / "corpus.yaml").write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "dagster", "job", "execute", "-m", "assets.definitions", "-j", "corpus_train"],
        cwd=ROOT,
        env={**os.environ, "LATENTLINE_CONFIGS": str(root / "configs")},
        capture_output=True,
        text=True,
        check=False,
    )


def refused() -> list[Case]:
    return [case for case in CASES if case.reason not in (None, "passed over")]


def test_by_default_a_gate_closes_with_the_full_list(root: Path, tiny_sd: Path) -> None:
    done = run(root, tiny_sd, "{}")
    assert done.returncode == 1
    said = done.stdout + done.stderr
    for gate in ("captions_present", "captions_decodable", "captions_unshared", "rejected_fraction"):
        assert gate in said
    assert "fix:" in said.rsplit("Error:", 1)[-1], "the last words have no fix"
    rejected = pl.read_parquet(root / "out" / "tables" / "rejected.parquet")
    assert {case.name for case in refused()} <= set(rejected["path"])
    assert not rejected.filter(
        (pl.col("reason") == "") | (pl.col("detail") == "") | (pl.col("fix") == "")
    ).height
    assert not (root / "out" / "lora").exists()


def test_what_is_good_is_trained_on_when_the_gates_are_opened_by_name(root: Path, tiny_sd: Path) -> None:
    gates = "captions_present, captions_decodable, captions_unshared"
    done = run(root, tiny_sd, f"{{max_rejected_fraction: 1.0, allow: [{gates}]}}")
    assert done.returncode == 0, done.stderr[-3000:]
    kept = pl.read_parquet(root / "out" / "tables" / "trained_lora.parquet")
    wanted = {case.name for case in CASES if case.reason is None} | {f"good/{i:02}.png" for i in range(20)}
    assert set(kept["path"]) == wanted
    assert (root / "out" / "lora" / "pytorch_lora_weights.safetensors").is_file()
