from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import Lumina2Pipeline, Lumina2Transformer2DModel

from demo.tiny_models import make_tiny_lumina2
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.worker.adapter.lora import add_lora
from pipeline.trained_lora.worker.export.layouts import layout_tensors
from pipeline.trained_lora.worker.export.modules import describe_networks
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

ORIGINAL = ("attention_qkv", "attention_out", "feed_forward_w1", "feed_forward_w2", "feed_forward_w3")
BLOCKS = ("layers_0", "layers_1", "noise_refiner_0", "context_refiner_0")


class Lumina2Case(Case):
    pipeline_class = Lumina2Pipeline
    targets: ClassVar[list[str]] = [
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *(f"feed_forward.linear_{number}" for number in (1, 2, 3)),
    ]

    def make(self, folder: Path) -> None:
        make_tiny_lumina2(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding, mask, empty, empty_mask = pipe.encode_prompt(caption)
        if not caption:  # the negative prompt's embedding
            embedding, mask = empty, empty_mask
        return {"text_embedding": embedding, "text_mask": mask}

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone, without padding tokens."""
        predictions = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            length = int(micro.conditions["text_mask"][index].sum())
            time = 1 - micro.timesteps[index : index + 1] / 1000
            mask = torch.ones(1, length, dtype=torch.int64)
            predictions.append(-pipe.transformer(noisy[index][None], time, text[None, :length], mask).sample)
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        return {f"lora_unet_{block}_{layer}" for block in BLOCKS for layer in ORIGINAL}

    def comfyui_keys(self, modules: set[str]) -> set[str]:
        return self.kohya_keys()


def test_training_shifts_noise_levels_as_the_original_training_code(tmp_path: Path) -> None:
    make_tiny_lumina2(tmp_path)
    family = load_family(tmp_path)
    half = torch.tensor([0.5], dtype=torch.float64)
    for edge_px, mu in ((256, 0.5), (1024, 1.15)):
        shape = (16, edge_px // 8, edge_px // 8)
        timestep = family.noise.timesteps(family.noise.load_scheduler(), half, shape).item()
        assert timestep == pytest.approx(1000 / (1 + math.exp(-mu)), abs=1e-2)


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(Lumina2Case())


def test_diffusers_reads_stacked_layers_of_the_published_width(tmp_path: Path) -> None:
    """diffusers' converter supports only that width, and original names instead of kohya's."""
    make_tiny_lumina2(tmp_path)
    family = load_family(tmp_path)
    with torch.device("meta"):
        real: Any = Lumina2Transformer2DModel(num_layers=0, num_refiner_layers=1)
    del real.noise_refiner
    add_lora(real, LoraSettings(rank=2, alpha=2.0), targets=family.lora_targets(), seed=1)
    modules = describe_networks(family, {"": real})
    random = torch.Generator().manual_seed(1)
    state = {
        f"{module.name}.lora_{side}.weight": torch.randn(shape, generator=random)
        for module in modules
        for side, shape in zip("AB", module.shapes("diffusers").values(), strict=True)
    }
    original = {
        key.replace("lora_unet_context_refiner_0_", "diffusion_model.context_refiner.0.")
        .replace("attention_", "attention.")
        .replace("feed_forward_", "feed_forward.")
        .replace("lora_down", "lora_A")
        .replace("lora_up", "lora_B"): tensor
        for key, tensor in layout_tensors("kohya", modules, state, {}).items()
        if not key.endswith(".alpha")
    }
    converted = Lumina2Pipeline.lora_state_dict(original)
    assert set(converted) == {f"transformer.{name}" for name in state}
    for module in modules:
        down, up = (converted[f"transformer.{module.name}.lora_{side}.weight"] for side in "AB")
        own_down, own_up = (state[f"{module.name}.lora_{side}.weight"] for side in "AB")
        probe = torch.randn(down.shape[1], generator=random)
        torch.testing.assert_close(up @ (down @ probe), own_up @ (own_down @ probe), rtol=1e-5, atol=1e-3)


def test_a_long_caption_has_as_many_tokens_as_in_the_pipeline(tmp_path: Path) -> None:
    make_tiny_lumina2(tmp_path)
    family = load_family(tmp_path)
    encoders = family.text.load("float32", "cpu")
    caption = "a cat " * family.max_length()
    encoded = family.text.encode_caption(encoders, caption)
    with torch.no_grad():
        expected = Lumina2Case().embed(Lumina2Pipeline.from_pretrained(tmp_path), caption)
    assert len(encoded.tensors["text_embedding"]) == expected["text_mask"].sum() == family.max_length()
