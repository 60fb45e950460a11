"""The complete corpus and 20 good images in one folder, through the real job."""

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
    folder = tmp_path_factory.mktemp("corpus")
    good = [Case(f"good/{index:02}.png", photo(index)) for index in range(20)]
    make(folder / "photos", [*CASES, *good])
    (folder / "configs").mkdir()
    return folder


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


def rejected_cases() -> list[Case]:
    return [case for case in CASES if case.reason not in (None, "skipped")]


def test_by_default_gates_close_and_all_bad_files_are_listed(root: Path, tiny_sd: Path) -> None:
    process = run(root, tiny_sd, "{}")
    assert process.returncode == 1
    output = process.stdout + process.stderr
    for gate in ("captions_present", "captions_decodable", "captions_unshared", "rejected_fraction"):
        assert gate in output
    assert "fix:" in output.rsplit("Error:", 1)[-1], "the last message has no fix"
    rejected = pl.read_parquet(root / "out" / "tables" / "rejected.parquet")
    assert {case.name for case in rejected_cases()} <= set(rejected["path"])
    assert not rejected.filter(
        (pl.col("reason") == "") | (pl.col("detail") == "") | (pl.col("fix") == "")
    ).height
    assert not (root / "out" / "lora").exists()


def test_with_allowed_gates_the_good_images_are_trained_on(root: Path, tiny_sd: Path) -> None:
    gates = "captions_present, captions_decodable, captions_unshared"
    process = run(root, tiny_sd, f"{{max_rejected_fraction: 1.0, allow: [{gates}]}}")
    assert process.returncode == 0, process.stderr[-3000:]
    trained_rows = pl.read_parquet(root / "out" / "tables" / "trained_lora.parquet")
    expected = {case.name for case in CASES if case.reason is None} | {f"good/{i:02}.png" for i in range(20)}
    assert set(trained_rows["path"]) == expected
    assert (root / "out" / "lora" / "pytorch_lora_weights.safetensors").is_file()
