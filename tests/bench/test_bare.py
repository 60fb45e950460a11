from __future__ import annotations

import subprocess
from pathlib import Path

from safetensors import safe_open

from bench import bare
from bench.workload import photographs
from demo.tiny_models import make_tiny


def test_the_plain_process_encodes_without_modules_of_the_project(tmp_path: Path) -> None:
    make_tiny(tmp_path / "tiny")
    photographs(tmp_path / "photos", 2, max_px=1_000_000)
    python, *arguments = bare.command("encode", tmp_path / "tiny", tmp_path / "photos", tmp_path / "out", 64)
    command = [python, "-X", "importtime", *arguments]
    process = subprocess.run(command, check=True, capture_output=True, text=True)

    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in process.stderr.splitlines()}
    assert "diffusers" in imported
    assert not imported & {"bench", "pipeline"}
    for path in sorted((tmp_path / "out").iterdir()):
        with safe_open(path, framework="pt") as tensors:
            assert {*tensors.keys()} == {"latent", "text"}
