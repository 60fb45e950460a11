"""Patterns of `training.lora` are compared with the base model's weights before anything is launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import TrainingError
from pipeline.models.families import detect
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.module_patterns import require_module_patterns


def require(base: Path, **settings: Any) -> None:
    require_module_patterns(LoraSettings.model_validate(settings), detect(base))


def test_patterns_of_layers_are_accepted(tiny_bases: dict[str, Path]) -> None:
    for base in tiny_bases.values():
        targets = detect(base).lora_targets()
        require(base, modules=tuple(f"*{target}" for target in targets))


def test_all_patterns_without_a_layer_are_reported_with_similar_ones(tiny_sd: Path) -> None:
    with pytest.raises(TrainingError) as excinfo:
        require(
            tiny_sd,
            modules=("*.to_qq", "*.attn1.to_k", "up_blocks.9.*.attn2.to_q"),
            ranks=({"modules": "*.fff.*", "rank": 2},),
        )
    assert excinfo.value.what.split("; ") == [
        "training.lora.modules: the pattern *.to_qq matches no layer",
        "training.lora.modules: the pattern up_blocks.9.*.attn2.to_q matches no layer",
        "training.lora.ranks: the pattern *.fff.* matches no layer",
    ]
    fixes = excinfo.value.fix.split("; ")
    assert fixes[0].startswith("for *.to_qq write a pattern such as *.to_q")
    assert fixes[1].startswith(
        "for up_blocks.9.*.attn2.to_q write a pattern such as up_blocks.*.*.attn2.to_q"
    )
    assert fixes[2].startswith("for *.fff.* write a pattern such as *.ff.*")
    for fix in fixes:
        for pattern in fix.partition("such as ")[2].split(", "):
            require(tiny_sd, modules=(pattern,))


def test_weights_that_are_no_safetensors_are_not_compared(tiny_sd: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    for path in tiny_sd.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "unet").unlink()
    (folder / "unet").mkdir()
    for path in (tiny_sd / "unet").glob("*.json"):
        (folder / "unet" / path.name).symlink_to(path)
    (folder / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"pickle")
    require(folder, modules=("*.to_qq",))
