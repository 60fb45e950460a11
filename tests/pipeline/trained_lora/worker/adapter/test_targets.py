"""The layers that each preset adapts in each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from demo.tiny_models import TINY, make_tiny_sd3
from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.worker.adapter.targets import target_modules

# diffusers' Chroma imports a class from a deprecated path.
pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")


def test_conv_rank_is_an_error_for_a_transformer(tmp_path: Path) -> None:
    make_tiny_sd3(tmp_path)
    family = load_family(tmp_path)
    denoiser = family.denoiser.load("float32", "cpu")
    with pytest.raises(
        TrainingError, match="needs convolutions, and the blocks of SD3Transformer2DModel have none"
    ):
        target_modules(denoiser, LoraSettings(conv_rank=4), family.lora_targets())


# diffusers' ChatGLM, the language model of Kolors, warns on import.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("preset", ["attention", "blocks"])
@pytest.mark.parametrize("kind", TINY)
def test_the_layers_of_each_preset_have_names_in_every_layout(tmp_path: Path, kind: str, preset: Any) -> None:
    TINY[kind](tmp_path)
    family = load_family(tmp_path)
    denoiser = family.denoiser.load("float32", "cpu")
    chosen = target_modules(denoiser, LoraSettings(targets=preset), family.lora_targets())
    assert [name for name in chosen if not (family.kohya_layer(name).key and family.comfyui_key(name))] == []
    assert [name for name in chosen if "norm" in name or "embed" in name or "mod" in name] == []
    targets = set(target_modules(denoiser, LoraSettings(), family.lora_targets()))
    attention = {name for name in targets if "attn" in name or "attention" in name}
    assert attention <= set(chosen)
    assert preset == "attention" or targets <= set(chosen)
