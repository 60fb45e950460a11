from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import Krea2Pipeline

from demo.tiny_models import make_tiny_krea2
from demo.tiny_models.parts import write_json
from pipeline.models.diffusers_folder import read_json
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

ATTENTION = {"to_q": "wq", "to_k": "wk", "to_v": "wv", "to_out.0": "wo", "to_gate": "gate"}
LAYERS = {f"attn.{name}": f"attn.{original}" for name, original in ATTENTION.items()}
LAYERS |= {f"ff.{name}": f"mlp.{name}" for name in ("gate", "up", "down")}
BLOCKS = ("blocks.0", "blocks.1", "txtfusion.layerwise_blocks.0", "txtfusion.refiner_blocks.0")


class Krea2Case(Case):
    pipeline_class = Krea2Pipeline
    targets: ClassVar[list[str]] = list(LAYERS)

    def make(self, folder: Path) -> None:
        make_tiny_krea2(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        """Return the states that the mask keeps; padding follows the caption."""
        states, mask = pipe.encode_prompt(caption)
        valid_states = states[:, mask[0]]
        assert valid_states.shape[1] < states.shape[1] == 512
        return {"text_embedding": valid_states.flatten(2), "text_mask": torch.ones(valid_states.shape[:2])}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        config = pipe.vae.config
        raw = pipe.vae.encode(pixels[:, :, None]).latent_dist.mode()
        mean, std = (
            torch.tensor(each).view(1, -1, 1, 1, 1) for each in (config.latents_mean, config.latents_std)
        )
        return ((raw - mean) / std)[:, :, 0]

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone, without a mask; all text tokens are at position (0, 0, 0)."""
        rows, columns = noisy.shape[2] // 2, noisy.shape[3] // 2
        places = [[0, row, column] for row in range(rows) for column in range(columns)]
        predictions = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            length = int(micro.conditions["text_mask"][index].sum())
            states = text[:length].reshape(1, length, 3, 32)
            patches = noisy[index].reshape(16, rows, 2, columns, 2).permute(1, 3, 0, 2, 4)
            tokens = pipe.transformer(
                patches.reshape(1, rows * columns, 64),
                states,
                micro.timesteps[index : index + 1] / 1000,
                torch.tensor([[0, 0, 0]] * length + places, dtype=torch.float32),
            ).sample
            prediction = tokens.reshape(rows, columns, 16, 2, 2).permute(2, 0, 3, 1, 4)
            predictions.append(prediction.reshape(1, *noisy.shape[1:]))
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        return {f"lora_unet_{key}".replace(".", "_") for key in originals()}

    def comfyui_keys(self, modules: set[str]) -> set[str]:
        return {f"diffusion_model.{key}" for key in originals()}


def originals() -> set[str]:
    return {f"{block}.{layer}" for block in BLOCKS for layer in LAYERS.values()}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(Krea2Case())


def test_original_layer_names_match_diffusers_converter(tmp_path: Path) -> None:
    make_tiny_krea2(tmp_path)
    family = load_family(tmp_path)
    blocks = ("transformer_blocks.1", "text_fusion.layerwise_blocks.0", "text_fusion.refiner_blocks.0")
    modules = [f"{block}.{layer}" for block in blocks for layer in LAYERS] + ["text_fusion.projector"]
    ends = ("lora_A.weight", "lora_B.weight")
    original = {f"{family.comfyui_key(each)}.{end}": torch.zeros(1, 1) for each in modules for end in ends}
    read = Krea2Pipeline.lora_state_dict(original)
    assert set(read) == {f"transformer.{module}.{end}" for module in modules for end in ends}


def test_a_distilled_model_has_one_shift_for_every_size(tmp_path: Path) -> None:
    make_tiny_krea2(tmp_path)
    half = torch.tensor([0.5], dtype=torch.float64)
    shifts = {}
    for distilled in (False, True):
        index = {**read_json(tmp_path / "model_index.json"), "is_distilled": distilled}
        write_json(tmp_path / "model_index.json", index)
        family = load_family(tmp_path)
        scheduler = family.noise.load_scheduler()
        shifts[distilled] = [family.noise.timesteps(scheduler, half, (16, e, e)).item() for e in (32, 160)]
        assert family.timestep_facts()["is_distilled"] == distilled
    expected = [1000 / (1 + torch.exp(torch.tensor(-mu)).item()) for mu in (0.5, 1.15)]
    assert shifts[False] == pytest.approx(expected, abs=1e-2)
    assert shifts[True] == pytest.approx([expected[1]] * 2, abs=1e-2)
