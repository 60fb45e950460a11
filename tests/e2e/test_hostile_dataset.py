"""I14: 20 good images among all attack files train within a minute and 1.5 GB; the job names each attack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image

from tests.e2e.problems import last_problem
from tests.hostile_images import float_tiff, jpeg_with_scans, png, png_with_warnings

MAX_PEAK_MB = 1_500
MAX_SECONDS = 60
HOSTILE_NAME = "x\x1b]0;owned\x07\u202egnp.[a](http:__evil)<img src=x>.png"
SECRET = "AKIA0123456789 secret access key"

REJECTED = {
    "float.tif": "too_much_memory",
    "deep.png": "too_much_memory",
    "scans.jpg": "too_many_scans",
    "sparse.jpg": "file_too_large",
    "linked.png": "caption_outside_dataset",
    "environment.png": "caption_outside_dataset",
    "pipe.png": "caption_unreadable",
    "endless.png": "caption_outside_dataset",
    "script.png": "not_an_image",
    HOSTILE_NAME: "undecodable",
    "bomb.png": "too_much_memory",
}
"""Reason by path of each attack file that becomes a rejected sample."""

_MEASURED = """
import json, resource, subprocess, sys
status = subprocess.run(sys.argv[2:]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    json.dump([used.ru_utime + used.ru_stime, used.ru_maxrss / 1000], file)
sys.exit(status)
"""
"""Runs a command, and writes the processor time of all its processes and the largest memory of one, in MB.

A process of its own is needed because a child's peak begins with the memory of the process that started it.
"""


def picture(seed: int, path: Path) -> None:
    levels = np.random.default_rng(seed).integers(0, 256, (64 + seed, 80, 3), dtype=np.uint8)
    Image.fromarray(levels).save(path)
    path.with_suffix(".txt").write_text(f"a good picture {seed}", encoding="utf-8")


def write_attacks(folder: Path, archive: Path, outside: Path) -> None:
    """Write every attack file below a folder, and a zip archive with a good picture and a bomb."""
    outside.write_text(SECRET, encoding="utf-8")
    for name in ("linked", "environment", "pipe", "endless"):
        picture(90 + len(name), folder / f"{name}.png")
        (folder / f"{name}.txt").unlink()
    (folder / "linked.txt").symlink_to(outside)
    (folder / "environment.txt").symlink_to("/proc/self/environ")
    os.mkfifo(folder / "pipe.txt")
    (folder / "endless.txt").symlink_to("/dev/zero")

    attacks = {
        "float.tif": float_tiff(),
        "deep.png": png(),
        "scans.jpg": jpeg_with_scans(2_000, edge_px=512),
        "sparse.jpg": b"\xff\xd8\xff",
        "script.png": b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) (r) file",
        HOSTILE_NAME: b"\x89PNG\r\n\x1a\nnot an image",
        "warnings.png": png_with_warnings(20_000, edge_px=80),
    }
    for name, data in attacks.items():
        (folder / name).write_bytes(data)
        (folder / name).with_suffix(".txt").write_text("an attack", encoding="utf-8")
    os.truncate(folder / "sparse.jpg", 6 * 10**9)
    (folder / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(folder / "fifo.jpg")

    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("bomb.png", png(bit_depth=16))
        file.writestr("bomb.txt", "an attack")


@pytest.fixture
def hostile(fresh: Any, tmp_path: Path) -> Any:
    """A workspace whose folder of photographs holds 20 good ones and the attacks."""
    for path in fresh.data.iterdir():
        path.unlink()
    for seed in range(20):
        picture(seed, fresh.data / f"good{seed:02}.png")
    write_attacks(fresh.data, tmp_path / "bomb.zip", tmp_path / "credentials")
    (tmp_path / "configs" / "bomb.yaml").write_text(ALIAS_BOMB, encoding="utf-8")
    return fresh


ALIAS_BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 9)]
)


def run(hostile: Any, **checks: Any) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """Run the training job; return the process, its processor time, and the peak memory of a process in MB.

    Processor time does not depend on the load of the machine; the test's time limit notices waiting.
    """
    datasets = [
        {"name": "photos", "path": str(hostile.data)},
        {"name": "archive", "path": f"zip://::{hostile.root / 'bomb.zip'}"},
    ]
    training = {"steps": 2, "batch_size": 4, "checkpoint_every": 2, "sample_every": 0, "lora": {"rank": 2}}
    hostile.recipe(datasets=datasets, training=training, checks=checks)
    peak = hostile.root / "peak"
    job = hostile.command("job", "execute", "-m", "assets.definitions", "-j", "small_train")
    process = hostile.run([sys.executable, "-c", _MEASURED, str(peak), *job])
    seconds, peak_mb = json.loads(peak.read_text())
    return process, seconds, peak_mb


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_I14_by_default_the_job_stops_at_the_gates_and_names_each_attack_with_a_fix(hostile: Any) -> None:
    process, seconds, peak_mb = run(hostile)
    assert process.returncode == 1
    output = process.stdout + process.stderr
    assert "captions_decodable" in output
    assert "bomb.yaml" in output
    assert last_problem(process.stderr).fix
    assert seconds < MAX_SECONDS
    assert peak_mb < MAX_PEAK_MB
    assert not (hostile.out / "lora").exists()

    rejected = pl.read_parquet(hostile.out / "tables" / "rejected.parquet")
    assert dict(rejected.select("path", "reason").rows()) == REJECTED
    assert rejected.filter((pl.col("detail") == "") | (pl.col("fix") == "")).is_empty()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_I14_with_the_gates_allowed_the_good_images_train_and_no_attack_is_published(hostile: Any) -> None:
    process, seconds, peak_mb = run(hostile, max_rejected_fraction=1.0, allow=["captions_decodable"])
    assert process.returncode == 0, process.stderr[-3000:]
    assert seconds < MAX_SECONDS
    assert peak_mb < MAX_PEAK_MB

    trained = pl.read_parquet(hostile.out / "tables" / "trained_lora.parquet")
    assert sorted(trained["path"]) == [*(f"good{seed:02}.png" for seed in range(20)), "warnings.png"]
    assert (hostile.out / "lora" / "pytorch_lora_weights.safetensors").is_file()

    output = process.stdout + process.stderr
    assert len(output.splitlines()) < 300
    assert "20,000 warnings, which are not shown" in output
    assert [part for part in ("\x1b]", "\x07", "\u202e", SECRET) if part in output] == []
    files = [path for path in hostile.out.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
