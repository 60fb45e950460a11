from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from pipeline.cli.main import latentline


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """A LoRA of another program with one layer of rank 4 that could have rank 1."""
    down, up = np.zeros((4, 6), np.float32), np.zeros((5, 4), np.float32)
    down[0], up[:, 0] = 1.0, 2.0
    down[1, 0], up[0, 1] = 0.01, 0.01
    key = "lora_unet_mid_block_attentions_0_proj_in"
    tensors = {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up, f"{key}.alpha": np.float32(2)}
    path = tmp_path / "other.safetensors"
    save_file({name: np.asarray(each) for name, each in tensors.items()}, path, metadata={"ss_steps": "700"})
    return path


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(latentline, ["lora", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


def test_info_shows_rank_scale_and_norm(lora: Path) -> None:
    output = run("info", lora)

    assert "steps        700" in output
    assert "lora_unet: 1 layer" in output
    assert "rank         4" in output
    assert "for 99%      1" in output
    assert "scale        0.5" in output
    assert f"norm         {np.sqrt(30):.4g}" in output
    (layer,) = json.loads(run("info", lora, "--json"))["layers"]
    assert layer["rank_for_energy"] == 1
    assert layer["shape"] == [5, 6]


def test_resize_reports_the_energy_that_is_kept(lora: Path, tmp_path: Path) -> None:
    output = run("resize", lora, tmp_path / "small.safetensors", "--energy", 0.99)

    assert "1 layer of rank 1" in output
    assert "energy kept: 100.00% on average" in output
    assert "rank         1" in run("info", tmp_path / "small.safetensors")


def test_merge_weighs_each_file_and_block(lora: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.safetensors"
    output = run("merge", both, "--add", lora, 1, "--add", lora, -0.5, "--block", lora, "*proj*", 0.25)

    # The pattern applies to the file, and so to both terms: 0.25 + 0.25.
    assert "of rank 8" in output
    assert f"norm         {np.sqrt(30) / 2:.4g}" in run("info", both)


def test_wrong_usage_is_named(lora: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.safetensors"

    assert "Pass --rank, --energy or both" in run("resize", lora, new, status=2)
    assert "which no --add names" in run(
        "merge", new, "--add", lora, 1, "--block", tmp_path / "x", "*", 1, status=2
    )
