"""LoRA files of other trainers: dense LoRAs of layers that combine modules, alphas in diffusers' layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from demo.tiny_models import make_tiny_flux
from pipeline.errors import TrainingError
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.pictures.worker.file_adapter import FileAdapter
from pipeline.trained_lora.worker.adapter.lora import add_lora, delta_weights, trainable_weights
from pipeline.trained_lora.worker.adapter.warm_start import read_lora_tensors, warm_start
from pipeline.trained_lora.worker.export.exporter import Exporter
from pipeline.trained_lora.worker.export.modules import describe_denoiser
from pipeline.trained_lora.worker.export.read_back import loaded_weights

BLOCK = "transformer_blocks.0.attn"
PARTS = ("to_q", "to_k", "to_v")
QKV = "lora_unet_double_blocks_0_img_attn_qkv"
"""Layer of sd-scripts that combines the three parts of diffusers' block."""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> WorkerFamily:
    folder = tmp_path_factory.mktemp("flux")
    make_tiny_flux(folder)
    return load_family(folder)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def dense_file(family: WorkerFamily, path: Path, *, rank: int, alpha: float) -> Path:
    """Write a LoRA of one layer, as sd-scripts trains it by default."""
    layer = family.denoiser.load("float32", "cpu").get_submodule(f"{BLOCK}.to_q")
    tensors = {
        f"{QKV}.lora_down.weight": random(rank, layer.in_features),
        f"{QKV}.lora_up.weight": random(3 * layer.out_features, rank),
        f"{QKV}.alpha": torch.tensor(alpha),
    }
    save_file(tensors, path)
    return path


def of_diffusers(family: WorkerFamily, file: Path) -> dict[str, Tensor]:
    """Return the changes of the weights after diffusers has loaded the file."""
    denoiser: Any = family.denoiser.load("float32", "cpu")
    state, alphas, metadata = diffusers.FluxPipeline.lora_state_dict(
        file.parent, weight_name=file.name, return_alphas=True, return_lora_metadata=True
    )
    denoiser.load_lora_adapter(
        state, prefix="transformer", network_alphas=alphas, metadata=metadata, adapter_name="default"
    )
    return {
        name.removesuffix(".base_layer"): module.get_delta_weight("default").detach()
        for name, module in denoiser.named_modules()
        if hasattr(module, "get_delta_weight") and "default" in module.lora_A
    }


def of_file_adapter(family: WorkerFamily, file: Path) -> dict[str, Tensor]:
    networks = {"": family.denoiser.load("float32", "cpu")}
    FileAdapter(family, networks, read_lora_tensors(file))
    return {name: compute() for name, compute in delta_weights(networks[""]).items()}


def of_warm_start(family: WorkerFamily, file: Path, **lora: Any) -> dict[str, Tensor]:
    denoiser: Any = family.denoiser.load("float32", "cpu")
    settings = LoraSettings.model_validate_json(json.dumps(lora))
    add_lora(denoiser, settings, targets=family.lora_targets(), seed=1)
    warm_start({"": denoiser}, describe_denoiser(family, denoiser), file)
    return {name: compute() for name, compute in delta_weights(denoiser).items()}


def require_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, delta in expected.items():
        assert float(delta.abs().max()) > 0, name
        torch.testing.assert_close(actual[name], delta, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("rank", [1, 3, 4, 6])
def test_a_dense_lora_of_a_fused_layer_has_the_effect_that_diffusers_gives_it(
    family: WorkerFamily, tmp_path: Path, rank: int
) -> None:
    file = dense_file(family, tmp_path / "dense.safetensors", rank=rank, alpha=2.0)
    expected = of_diffusers(family, file)
    assert sorted(expected) == sorted(f"{BLOCK}.{part}" for part in PARTS)
    require_equal(of_file_adapter(family, file), expected)
    modules = [f"{BLOCK}.{part}" for part in PARTS]
    require_equal(of_warm_start(family, file, rank=rank, alpha=1.0, modules=modules), expected)


@pytest.mark.parametrize(
    ("rank", "parts", "shown"),
    [
        (2, PARTS, "the adapter has (6, 32), the file (18, 32)"),
        (6, PARTS[:2], "the file also changes parts of this layer that have no adapter"),
    ],
    ids=["another rank", "a part without adapter"],
)
def test_a_dense_lora_that_does_not_fit_the_adapter_is_an_error(
    family: WorkerFamily, tmp_path: Path, rank: int, parts: tuple[str, ...], shown: str
) -> None:
    file = dense_file(family, tmp_path / "dense.safetensors", rank=6, alpha=2.0)
    with pytest.raises(TrainingError) as raised:
        of_warm_start(family, file, rank=rank, modules=[f"{BLOCK}.{part}" for part in parts])
    assert shown in raised.value.where
    assert "training.lora" in raised.value.fix


def diffusers_file(family: WorkerFamily, path: Path, metadata: dict[str, Any], **alphas: float) -> Path:
    """Write a LoRA of rank 4 in diffusers' layout, with alphas as tensors or in the metadata of peft."""
    layer = family.denoiser.load("float32", "cpu").get_submodule(f"{BLOCK}.to_q")
    tensors: dict[str, Tensor] = {}
    for part in PARTS:
        key = f"transformer.{BLOCK}.{part}"
        tensors[f"{key}.lora_A.weight"] = random(4, layer.in_features)
        tensors[f"{key}.lora_B.weight"] = random(layer.out_features, 4)
        if part in alphas:
            tensors[f"{key}.alpha"] = torch.tensor(alphas[part])
    stored = {f"transformer.{key}": value for key, value in metadata.items()}
    save_file(tensors, path, {"lora_adapter_metadata": json.dumps(stored)} if metadata else None)
    return path


PATTERNS = {
    "r": 8,
    "lora_alpha": 8,
    "rank_pattern": {"to_[qkv]": 4},
    "alpha_pattern": {"to_k": 1, "attn.to_v": 8},
    "target_modules": [f"{BLOCK}.{part}" for part in PARTS],
}


@pytest.mark.parametrize(
    ("metadata", "alphas"),
    [({}, {"to_q": 2.0, "to_k": 8.0, "to_v": 4.0}), (PATTERNS, {})],
    ids=["alphas as tensors", "patterns"],
)
def test_scales_in_the_layout_of_diffusers_are_read_as_diffusers_does(
    family: WorkerFamily, tmp_path: Path, metadata: dict[str, Any], alphas: dict[str, float]
) -> None:
    file = diffusers_file(family, tmp_path / "lora.safetensors", metadata, **alphas)
    expected = of_diffusers(family, file)
    require_equal(of_file_adapter(family, file), expected)
    modules = [f"{BLOCK}.{part}" for part in PARTS]
    require_equal(of_warm_start(family, file, rank=4, modules=modules), expected)

    networks = {"": family.denoiser.load("float32", "cpu")}
    read = loaded_weights(file, diffusers.FluxPipeline, networks, {}, denoiser_name="transformer")
    by_hand = {name: each.scale * each.up @ each.down for name, each in read.items()}
    require_equal(by_hand, expected)


def trained_denoiser(family: WorkerFamily, lora: dict[str, Any]) -> Any:
    """Return a denoiser whose adapter is not zero, as after training."""
    denoiser: Any = family.denoiser.load("float32", "cpu")
    settings = LoraSettings.model_validate_json(json.dumps(lora))
    add_lora(denoiser, settings, targets=family.lora_targets(), seed=1)
    with torch.no_grad():
        for number, weight in enumerate(trainable_weights(denoiser)):
            weight.copy_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    return denoiser


@pytest.mark.parametrize(("rank", "factor"), [(4, 4), (8, 2), (6, 4)])
def test_R06_a_lokr_of_any_rank_is_exported(
    family: WorkerFamily, tmp_path: Path, rank: int, factor: int
) -> None:
    """The feed-forward part of kohya's linear1 is larger than query, key and value, and so is its rank."""
    denoiser = trained_denoiser(family, {"kind": "lokr", "rank": rank, "lokr_factor": factor})
    modules = describe_denoiser(family, denoiser)
    assert {len({*each.kohya_ranks}) for each in modules if each.kohya_ranks} == {2}
    Exporter(family, "demo", {}).export({"": denoiser}, tmp_path)
    trained = {name: compute().flatten(1) for name, compute in delta_weights(denoiser).items()}
    require_equal(of_file_adapter(family, tmp_path / "demo_kohya.safetensors"), trained)


def test_R06_parts_of_a_fused_layer_with_different_ranks_are_read_by_all(
    family: WorkerFamily, tmp_path: Path
) -> None:
    # diffusers knows the layers outside of this block at the size of the published model only.
    modules = [f"{BLOCK}.{part}" for part in PARTS]
    lora = {"rank": 4, "alpha": 2.0, "modules": modules, "ranks": [{"modules": "*.to_k", "rank": 7}]}
    denoiser = trained_denoiser(family, lora)
    assert {module.kohya_ranks for module in describe_denoiser(family, denoiser)} == {(4, 7, 4)}
    Exporter(family, "demo", {}).export({"": denoiser}, tmp_path)

    trained = {name: compute() for name, compute in delta_weights(denoiser).items()}
    kohya = tmp_path / "demo_kohya.safetensors"
    require_equal(of_diffusers(family, kohya), trained)
    require_equal(of_file_adapter(family, kohya), trained)
    require_equal(of_warm_start(family, kohya, **lora), trained)


@pytest.mark.parametrize(
    ("alpha", "dtype"), [(2.0, "float32"), (3.0, "float32"), (9.0, "float16"), (0.5, "bfloat16")]
)
def test_E09_diffusers_gives_comfyuis_file_the_trained_strength(
    family: WorkerFamily, tmp_path: Path, alpha: float, dtype: str
) -> None:
    """diffusers ignores the alphas of this layout, and so applied them 1.4 to 8 times as strong."""
    denoiser = trained_denoiser(family, {"rank": 4, "alpha": alpha})
    Exporter(family, "demo", {}, save_dtype=dtype).export({"": denoiser}, tmp_path)
    trained = {name: compute() for name, compute in delta_weights(denoiser).items()}
    read = of_diffusers(family, tmp_path / "demo_comfyui.safetensors")
    assert read.keys() == trained.keys()
    eps = torch.finfo(getattr(torch, dtype)).eps
    for name, delta in trained.items():
        assert float((read[name] - delta).norm() / delta.norm()) <= 4 * eps, name
