from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import LoraFileError
from pipeline.lora_files.extract import Extracted, Extraction, Targets, extract, read_job
from pipeline.lora_files.layers import read_layers
from pipeline.lora_files.worker.extract import extract_lora
from pipeline.processes.launch import Meanwhile
from pipeline.trained_lora.export.lora_files import LAYOUTS, layout_file
from tests.pipeline.lora_files.fused import fused_weights

WEIGHTS = "diffusion_pytorch_model.safetensors"

RANK = 3


def in_process(module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
    """Extract in this process; see `Launch`."""
    assert module == "pipeline.lora_files.worker"
    extract_lora(read_job(job_file), job_file.parent, lambda done, total, text: None)


def extracted(
    base: Path, tuned: Path, folder: Path, *, rank: int = RANK, targets: Targets = "blocks"
) -> Extracted:
    return extract(str(base), str(tuned), folder, Extraction(rank, targets), launch=in_process)


def tuned_model(base: Path, folder: Path, role: str, *, other: str = "") -> dict[str, torch.Tensor]:
    """Copy a model and change its attentions by matrices of rank 3; return the denoiser's new weights.

    `other` is another weight that changes.
    """
    shutil.copytree(base, folder)
    weights = load_file(folder / role / WEIGHTS)
    rng = torch.Generator().manual_seed(5)
    for key, weight in weights.items():
        if key.endswith(("to_q.weight", "to_out.0.weight")):
            down = torch.randn(RANK, weight.shape[1], generator=rng)
            weights[key] = weight + 0.1 * torch.randn(weight.shape[0], RANK, generator=rng) @ down
        if key == other:
            weights[key] = weight + 1.0
    save_file(weights, folder / role / WEIGHTS, metadata={"format": "pt"})
    return weights


def test_base_and_lora_are_the_tuned_model(tiny_bases: dict[str, Path], tmp_path: Path) -> None:
    expected = tuned_model(tiny_bases["epsilon"], tmp_path / "tuned", "unet")

    result = extracted(tiny_bases["epsilon"], tmp_path / "tuned", tmp_path / "lora")

    actual = fused_weights(tiny_bases["epsilon"], (tmp_path / "lora" / layout_file("diffusers", ""), 1.0))
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-5, atol=1e-5)
    assert result.energy == pytest.approx(1.0)
    assert result.outside == 0.0


def test_all_layouts_hold_the_change_of_fused_layers(tiny_bases: dict[str, Path], tmp_path: Path) -> None:
    base, tuned = tiny_bases["klein"], tmp_path / "tuned"
    weights = tuned_model(base, tuned, "transformer")
    before = load_file(base / "transformer" / WEIGHTS)

    extracted(base, tuned, tmp_path / "lora", targets="attention")

    change = sum(float((weights[key] - each).square().sum()) for key, each in before.items())
    for layout in LAYOUTS:
        layers = read_layers(tmp_path / "lora" / layout_file(layout, "lora")).layers.values()
        squares = sum(float(((layer.matrices[1] @ layer.matrices[0]) ** 2).sum()) for layer in layers)
        assert squares == pytest.approx(change, rel=1e-4), layout


def test_a_smaller_rank_keeps_the_largest_singular_values(
    tiny_bases: dict[str, Path], tmp_path: Path
) -> None:
    base = tiny_bases["epsilon"]
    weights = tuned_model(base, tmp_path / "tuned", "unet", other="conv_in.weight")
    before = load_file(base / "unet" / WEIGHTS)

    result = extracted(base, tmp_path / "tuned", tmp_path / "lora", rank=2)

    kept = total = 0.0
    for key, weight in before.items():
        if key.endswith(("to_q.weight", "to_out.0.weight")):
            squares = torch.linalg.svdvals(weights[key] - weight) ** 2
            kept, total = kept + float(squares[:2].sum()), total + float(squares.sum())
    outside = float((weights["conv_in.weight"] - before["conv_in.weight"]).square().sum())
    assert result.energy == pytest.approx(kept / total, rel=1e-4)
    assert result.outside == pytest.approx(outside / (outside + total), rel=1e-4)
    assert result.largest_outside == "conv_in.weight"


def test_models_that_do_not_fit_are_refused(tiny_bases: dict[str, Path], tmp_path: Path) -> None:
    base, new = tiny_bases["epsilon"], tmp_path / "lora"
    for tuned, match in {
        base: "the models are equal in all layers",
        tiny_bases["klein"]: "must be of one family",
        tiny_bases["sdxl"]: "must be of one family",
    }.items():
        with pytest.raises(LoraFileError, match=match):
            extracted(base, tuned, new)
        assert list(tmp_path.iterdir()) == []

    new.mkdir()
    with pytest.raises(LoraFileError, match="exists already"):
        extracted(base, tiny_bases["v_prediction"], new)
