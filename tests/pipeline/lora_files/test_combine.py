from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from pipeline.errors import LoraFileError
from pipeline.lora_files.combine import ORIGIN_KEY, Combined, Reduction, Term, combine
from pipeline.lora_files.layers import read_layers
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.export.lora_files import LAYOUTS, RUN_KEY, Layout, layout_file, read_lora_file
from pipeline.trained_lora.export.metadata import header_metadata
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.export.exporter import Exporter
from tests.pipeline.lora_files.fused import fused_weights
from tests.pipeline.trained_lora.project import FEW_MODULES, project_in

if TYPE_CHECKING:
    from pipeline.lora_files.layers import Dtype

EXACT = Reduction()


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory, tiny_bases: dict[str, Path]) -> dict[str, Path]:
    """Two LoRAs of one base model in all layouts, with other ranks and scales: folders by name."""
    folders: dict[str, Path] = {}
    for seed, (name, lora) in enumerate({"cat": {}, "style": {"rank": 3, "alpha": 6.0}}.items()):
        folder = tmp_path_factory.mktemp(name)
        job = project_in(folder, tiny_bases, lora={**FEW_MODULES, **lora}).job()
        family = load_family(job.base)
        engine = Engine(job, family)
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in engine.weights:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=rng))
        folders[name] = folder / "lora"
        Exporter(family, name, header_metadata(job, family)).export(engine.networks, folders[name])
    return folders


def file_of(loras: dict[str, Path], name: str, layout: Layout) -> Path:
    return loras[name] / layout_file(layout, name)


def merged(
    loras: dict[str, Path],
    path: Path,
    layout: Layout = "diffusers",
    *,
    reduction: Reduction = EXACT,
    dtype: Dtype | None = None,
) -> Combined:
    terms = [Term(file_of(loras, "cat", layout), 0.8), Term(file_of(loras, "style", layout), -0.5)]
    return combine(terms, path, reduction=reduction, dtype=dtype)


def delta(path: Path, key: str) -> np.ndarray[Any, Any]:
    layer = read_layers(path).layers[key]
    return layer.scale * layer.up.reshape(len(layer.up), -1) @ layer.down.reshape(layer.rank, -1)


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_diffusers_applies_a_merge_like_both_files(
    loras: dict[str, Path], tiny_bases: dict[str, Path], tmp_path: Path, layout: Layout
) -> None:
    result = merged(loras, tmp_path / "both.safetensors", layout)

    files = (file_of(loras, "cat", layout), 0.8), (file_of(loras, "style", layout), -0.5)
    expected = fused_weights(tiny_bases["epsilon"], *files)
    actual = fused_weights(tiny_bases["epsilon"], (result.path, 1.0))
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-5, atol=1e-6)
    assert set(result.ranks.values()) == {7}
    assert result.error < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_hold_the_sum(loras: dict[str, Path], tmp_path: Path, layout: Layout) -> None:
    result = merged(loras, tmp_path / "both.safetensors", layout)

    for key in result.ranks:
        terms = [delta(file_of(loras, name, layout), key) for name in ("cat", "style")]
        np.testing.assert_allclose(delta(result.path, key), 0.8 * terms[0] - 0.5 * terms[1], atol=1e-6)


def test_a_smaller_rank_is_the_best_one(loras: dict[str, Path], tmp_path: Path) -> None:
    result = merged(loras, tmp_path / "small.safetensors", reduction=Reduction(max_rank=2))

    exact = merged(loras, tmp_path / "exact.safetensors").path
    for key in result.ranks:
        left, values, right = np.linalg.svd(delta(exact, key))
        best = (left[:, :2] * values[:2]) @ right[:2]
        np.testing.assert_allclose(delta(result.path, key), best, atol=1e-5)
        assert result.energies[key] == pytest.approx((values[:2] ** 2).sum() / (values**2).sum())


def test_energy_chooses_the_smallest_rank_of_each_layer(loras: dict[str, Path], tmp_path: Path) -> None:
    result = merged(loras, tmp_path / "small.safetensors", reduction=Reduction(energy=0.9))

    exact = merged(loras, tmp_path / "exact.safetensors").path
    for key, rank in result.ranks.items():
        squares = np.linalg.svd(delta(exact, key), compute_uv=False) ** 2
        assert squares[:rank].sum() >= 0.9 * squares.sum()
        assert squares[: rank - 1].sum() < 0.9 * squares.sum()
    assert len(set(result.ranks.values())) > 1


def test_layers_of_a_pattern_have_their_own_weight(loras: dict[str, Path], tmp_path: Path) -> None:
    cat, style = (file_of(loras, name, "diffusers") for name in ("cat", "style"))
    terms = [Term(cat), Term(style, 1.0, [("*attn1*", 0.0), ("*attn1.to_q", 2.0)])]
    result = combine(terms, tmp_path / "both.safetensors", reduction=EXACT, dtype=None)

    for key in result.ranks:
        weight = 2.0 if key.endswith("attn1.to_q") else 0.0 if "attn1" in key else 1.0
        np.testing.assert_allclose(
            delta(result.path, key), delta(cat, key) + weight * delta(style, key), atol=1e-6
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_half_dtype_rounds_once(loras: dict[str, Path], tmp_path: Path, dtype: Dtype) -> None:
    result = merged(loras, tmp_path / "half.safetensors", dtype=dtype)

    from safetensors.torch import load_file as load_torch

    exact = load_torch(merged(loras, tmp_path / "exact.safetensors").path)
    for key, tensor in load_torch(result.path).items():
        assert torch.equal(tensor, exact[key].to(getattr(torch, dtype))), key
    assert 0 < result.error < 0.02


def test_the_file_names_what_it_was_made_from(loras: dict[str, Path], tmp_path: Path) -> None:
    result = merged(loras, tmp_path / "both.safetensors")

    metadata = read_lora_file(result.path).metadata
    origin = json.loads(metadata[ORIGIN_KEY])
    assert [(each["file"], each["weight"]) for each in origin] == [
        ("pytorch_lora_weights.safetensors", 0.8),
        ("pytorch_lora_weights.safetensors", -0.5),
    ]
    assert metadata["modelspec.architecture"] == "stable-diffusion-v1/lora"
    assert metadata["ss_network_dim"] == "7"
    # A warm start reads files of a run in another way, and the facts of one training are not true of two.
    assert RUN_KEY not in metadata
    assert "ss_steps" not in metadata


def changed(source: Path, path: Path, change: Any) -> Path:
    metadata = dict(read_lora_file(source).metadata)
    tensors = load_file(source)
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)
    return path


def refuse(*terms: Term, path: Path, match: str) -> None:
    with pytest.raises(LoraFileError, match=match):
        combine(terms, path, reduction=EXACT, dtype=None)
    assert not path.exists()


def test_files_that_do_not_fit_are_refused(loras: dict[str, Path], tmp_path: Path) -> None:
    cat, new = file_of(loras, "cat", "kohya"), tmp_path / "new.safetensors"
    key = next(iter(read_layers(cat).layers))

    def other_base(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        metadata["modelspec.architecture"] = "stable-diffusion-xl-v1-base/lora"

    def other_shape(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors[f"{key}.lora_down.weight"] = np.zeros((4, 5), np.float32)

    def dora(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors[f"{key}.dora_scale"] = np.ones((64, 1), np.float32)

    def without_up(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        del tensors[f"{key}.lora_up.weight"]

    def diverged(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors[f"{key}.lora_up.weight"][0, 0] = np.nan

    for change, match in {
        diverged: r"lora_unet\S+ has numbers that are not finite",
        other_base: "different base models: stable-diffusion-v1/lora and stable-diffusion-xl",
        other_shape: r"the weight of lora_unet\S+ has the shape",
        dora: r"not part of a LoRA: \S+dora_scale",
        without_up: "the up matrix of .* is missing",
    }.items():
        other = changed(cat, tmp_path / "other.safetensors", change)
        refuse(Term(cat), Term(other), path=new, match=match)
    refuse(Term(cat), Term(file_of(loras, "style", "diffusers")), path=new, match="no layer in common")
    refuse(Term(cat, 1.0, [("*nothing*", 0.0)]), path=new, match="no layer matches")


def test_a_file_is_never_replaced(loras: dict[str, Path], tmp_path: Path) -> None:
    new = tmp_path / "new.safetensors"
    new.write_text("mine")

    with pytest.raises(LoraFileError, match="exists already"):
        merged(loras, new)
    assert new.read_text() == "mine"


def test_numbers_that_a_dtype_cannot_hold_are_an_error(loras: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"

    with pytest.raises(LoraFileError, match="too large for float16"):
        combine([Term(file_of(loras, "cat", "kohya"), 1e8)], path, reduction=EXACT, dtype="float16")
    assert not path.exists()
