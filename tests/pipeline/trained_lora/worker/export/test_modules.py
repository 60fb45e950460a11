"""How the adapted modules of a denoiser are described to the writers of LoRA files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.tiny_models import make_tiny_sd3
from pipeline.errors import TrainingError
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.worker.adapter.lora import add_lora
from pipeline.trained_lora.worker.export.modules import describe_denoiser


def sd3_with_lora(folder: Path, lora: dict[str, Any]) -> tuple[WorkerFamily, Any]:
    """Return the family of a tiny SD 3, whose attention layers kohya fuses, and its adapted denoiser."""
    make_tiny_sd3(folder)
    family = load_family(folder)
    denoiser: Any = family.denoiser.load("float32", "cpu")
    settings = LoraSettings.model_validate_json(json.dumps(lora))
    add_lora(denoiser, settings, targets=family.lora_targets(), seed=1)
    return family, denoiser


def test_only_parts_of_a_fused_layer_have_the_rows_of_all_its_parts(tmp_path: Path) -> None:
    family, denoiser = sd3_with_lora(tmp_path, {"modules": ["*.0.attn.to_q", "*.0.ff.net.2"]})
    part, layer = describe_denoiser(family, denoiser)
    assert part.kohya_outs == (part.out_features,) * 3
    assert (layer.kohya_outs, layer.out_features) == ((), part.out_features)


def test_R06_fused_layers_have_the_rows_of_their_parts_even_if_quantised(tmp_path: Path) -> None:
    """bitsandbytes packs nf4 weights into a column of bytes, two numbers per byte."""
    family, denoiser = sd3_with_lora(tmp_path, {"modules": ["*.attn.to_q"]})
    plain = describe_denoiser(family, denoiser)
    assert all(len(module.kohya_outs) == 3 for module in plain), "parts without an adapter are among them"
    for name, layer in denoiser.named_modules():
        if type(layer) is torch.nn.Linear and "lora_" not in name:
            packed = torch.zeros(layer.weight.numel() // 2, 1, dtype=torch.uint8)
            layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    assert describe_denoiser(family, denoiser) == plain


@pytest.mark.parametrize(
    ("modules", "ranks"),
    [
        (["*.0.attn.to_q", "*.0.attn.to_k", "*.0.attn.to_v"], (2, 8, 8)),
        (["*.0.attn.to_q", "*.0.attn.to_v"], (2, 0, 8)),
    ],
    ids=str,
)
def test_parts_of_a_fused_layer_may_have_different_ranks(
    tmp_path: Path, modules: list[str], ranks: tuple[int, ...]
) -> None:
    lora = {"rank": 8, "modules": modules, "ranks": [{"modules": "*.to_q", "rank": 2}]}
    family, denoiser = sd3_with_lora(tmp_path, lora)
    described = describe_denoiser(family, denoiser)
    assert {module.kohya_ranks for module in described} == {ranks}
    assert {module.shapes("kohya")[module.keys("kohya")[0]][0] for module in described} == {sum(ranks)}
    starts = {module.name.rpartition("_")[2]: module.slices("kohya")[0].start for module in described}
    assert starts["v"] == sum(ranks[:2])


@pytest.mark.parametrize(
    ("lora", "expected_text"),
    [
        ({"dora": True, "modules": ["*.attn.to_q"]}, "DoRA needs an adapter on every part"),
        ({"ranks": [{"modules": "*.to_q", "rank": 2, "alpha": 1}]}, "must have one alpha / rank"),
        ({"rslora": True, "ranks": [{"modules": "*.to_q", "rank": 2}]}, "must have one alpha / rank"),
    ],
    ids=str,
)
def test_adapters_that_kohya_s_fused_layers_cannot_hold_are_errors(
    tmp_path: Path, lora: dict[str, Any], expected_text: str
) -> None:
    family, denoiser = sd3_with_lora(tmp_path, lora)
    with pytest.raises(TrainingError, match=expected_text):
        describe_denoiser(family, denoiser)
