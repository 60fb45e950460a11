from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import ZImagePipeline

from demo.tiny_models import make_tiny_z_image
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

LAYERS = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")
LAYERS += tuple(f"feed_forward.w{number}" for number in (1, 2, 3))
BLOCKS = ("layers.0", "layers.1", "noise_refiner.0", "context_refiner.0")


class ZImageCase(Case):
    pipeline_class = ZImagePipeline
    targets: ClassVar[list[str]] = list(LAYERS)

    def make(self, folder: Path) -> None:
        make_tiny_z_image(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding = pipe.encode_prompt(caption, do_classifier_free_guidance=False)[0][0]
        stored, mask = torch.zeros(1, 512, embedding.shape[1]), torch.zeros(1, 512)
        stored[0, : len(embedding)] = embedding
        mask[0, : len(embedding)] = 1
        return {"text_embedding": stored, "text_mask": mask}

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone."""
        predictions = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            length = int(micro.conditions["text_mask"][index].sum())
            time = (1000 - micro.timesteps[index : index + 1]) / 1000
            sample = pipe.transformer([noisy[index][:, None]], time, [text[:length]]).sample[0]
            predictions.append(-sample[:, 0])
        return torch.stack(predictions)

    def kohya_keys(self) -> set[str]:
        return {f"lora_unet_{block}_{layer}".replace(".", "_") for block in BLOCKS for layer in LAYERS}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(ZImageCase())


@pytest.mark.parametrize(
    ("turbo", "edge_px", "shift"),
    [(False, 256, math.exp(0.5)), (False, 1024, math.exp(1.15)), (True, 256, 3.0), (True, 1024, 3.0)],
)
def test_training_shifts_noise_levels_as_the_report_says_and_turbos_as_its_schedule(
    tmp_path: Path, turbo: bool, edge_px: int, shift: float
) -> None:
    make_tiny_z_image(tmp_path, turbo=turbo)
    family = load_family(tmp_path)
    half = torch.tensor([0.5], dtype=torch.float64)
    shape = (16, edge_px // 8, edge_px // 8)
    timestep = family.noise.timesteps(family.noise.load_scheduler(), half, shape).item()
    assert timestep == pytest.approx(1000 * shift / (1 + shift), abs=1e-2)
    assert family.objective == (1 if turbo else 2)
    assert family.timestep_facts()["use_dynamic_shifting"] is not turbo


@pytest.mark.parametrize("words", [3, 600])
def test_cut_tokens_are_counted_inside_the_template(tmp_path: Path, words: int) -> None:
    make_tiny_z_image(tmp_path)
    family = load_family(tmp_path)
    encoders = family.text.load("float32", "cpu")
    caption = " cat" * words
    encoded = family.text.encode_caption(encoders, caption)
    frame = family.text.encode_caption(encoders, "").num_tokens
    assert encoded.num_tokens == words + frame
    assert encoded.num_cut == max(0, words + frame - 512)
    before = len(encoders.tokenizer("<|im_start|>user\n").input_ids)
    assert encoded.cut_from == (4 * (512 - before) if words == 600 else None)
