"""The layers that each preset adapts in each family."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from demo.tiny_models import TINY, make_tiny_sd3
from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.worker.adapter.targets import rank_patterns, target_modules
from tests.tiny_models import TinyModel

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
def test_the_layers_of_each_preset_have_names_in_every_layout(
    tiny_model: TinyModel, kind: str, preset: Any
) -> None:
    family = load_family(tiny_model(kind))
    denoiser = family.denoiser.load("float32", "cpu")
    chosen = target_modules(denoiser, LoraSettings(targets=preset), family.lora_targets())
    assert [name for name in chosen if not (family.kohya_layer(name).key and family.comfyui_key(name))] == []
    assert [name for name in chosen if "norm" in name or "embed" in name or "mod" in name] == []
    targets = set(target_modules(denoiser, LoraSettings(), family.lora_targets()))
    attention = {name for name in targets if "attn" in name or "attention" in name}
    assert attention <= set(chosen)
    assert preset == "attention" or targets <= set(chosen)


class Block(nn.Module):
    """A block with each kind of layer that the presets distinguish."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.ModuleDict({"linear": nn.Linear(4, 8)})
        self.time_emb_proj = nn.Linear(4, 4)
        self.attn1 = nn.ModuleDict({"to_q": nn.Linear(4, 4), "to_out": nn.ModuleList([nn.Linear(4, 4)])})
        self.ff = nn.Linear(4, 4)
        self.conv = nn.Conv2d(4, 4, 3)
        self.conv_1d = nn.Conv2d(4, 4, (1, 3))
        self.shortcut = nn.Conv2d(4, 4, 1)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=2)


class Denoiser(nn.Module):
    """A denoiser with one block, and layers outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_in = nn.Linear(4, 4)
        self.conv_in = nn.Conv2d(4, 4, 3)
        self.down_blocks = nn.ModuleList([Block()])
        self.attn_out = nn.Linear(4, 4)


ATTENTION = ["down_blocks.0.attn1.to_q", "down_blocks.0.attn1.to_out.0"]
CONVOLUTIONS = ["down_blocks.0.conv", "down_blocks.0.conv_1d"]
SELECTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"targets": "attention"}, ATTENTION),
    ({"targets": "blocks"}, [*ATTENTION, "down_blocks.0.ff"]),
    ({"targets": "family"}, ["proj_in", "down_blocks.0.attn1.to_q"]),
    ({"targets": "attention", "conv_rank": 2}, [*ATTENTION, *CONVOLUTIONS]),
    ({"modules": ("*.ff", "conv_in")}, ["conv_in", "down_blocks.0.ff"]),
    ({"modules": ("*.shortcut",)}, ["down_blocks.0.shortcut"]),
    ({"modules": ("*.ff",), "conv_rank": 2}, ["down_blocks.0.ff", *CONVOLUTIONS]),
]


@pytest.mark.parametrize(("settings", "expected"), SELECTIONS, ids=str)
def test_each_setting_selects_its_layers_in_the_models_order(
    settings: dict[str, Any], expected: list[str]
) -> None:
    lora = LoraSettings.model_validate(settings)
    assert target_modules(Denoiser(), lora, ["to_q", "proj_in", "n1.to_q"]) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules": ("*.depthwise",)}, "the pattern \\*.depthwise matches no layer"),
        ({"modules": ("*.ff", "*.none")}, "training.lora.modules: the pattern \\*.none matches no layer"),
        (
            {"targets": "attention", "ranks": ({"modules": "*.ff", "rank": 2},)},
            "training.lora.ranks: the pattern",
        ),
        (
            {"targets": "attention", "learning_rates": ({"modules": "*.ff", "learning_rate": 1e-4},)},
            "training.lora.learning_rates: the pattern",
        ),
    ],
    ids=str,
)
def test_a_selection_or_pattern_without_a_layer_is_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message) as excinfo:
        target_modules(Denoiser(), LoraSettings.model_validate(settings), ["to_q"])
    assert excinfo.value.where == "training.lora, Denoiser"


def test_a_model_without_the_layers_of_its_family_is_an_error() -> None:
    with pytest.raises(TrainingError, match="selects no layer of Denoiser: it has none that match to_qkv"):
        target_modules(Denoiser(), LoraSettings(), ["to_qkv"])


def test_modules_with_a_rank_of_their_own_have_one_pattern_each_that_matches_no_other() -> None:
    lora = LoraSettings.model_validate(
        {
            "rank": 8,
            "alpha": 4.0,
            "conv_rank": 2,
            "targets": "attention",
            "ranks": ({"modules": "*.to_q", "rank": 3},),
        }
    )
    denoiser = Denoiser()
    selected = target_modules(denoiser, lora, [])
    ranks, alphas = rank_patterns(denoiser, selected, lora)
    assert ranks.keys() == alphas.keys()
    matching = {
        name: [rank for pattern, rank in ranks.items() if re.fullmatch(pattern, name)] for name in selected
    }
    assert matching == {
        "down_blocks.0.attn1.to_q": [3],
        "down_blocks.0.attn1.to_out.0": [],
        "down_blocks.0.conv": [2],
        "down_blocks.0.conv_1d": [2],
    }
