from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import CogView4Pipeline

from demo.tiny_models import make_tiny_cogview4
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

LAYERS = ("to_q", "to_k", "to_v", "to_out.0")


class CogView4Case(Case):
    pipeline_class = CogView4Pipeline
    targets: ClassVar[list[str]] = [f"attn1.{layer}" for layer in LAYERS]

    def make(self, folder: Path) -> None:
        make_tiny_cogview4(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding = pipe.encode_prompt(caption, do_classifier_free_guidance=False)[0][0]
        assert len(embedding) % 16 == 0
        stored, mask = torch.zeros(1, 1024, embedding.shape[1]), torch.zeros(1, 1024)
        stored[0, : len(embedding)] = embedding
        mask[0, : len(embedding)] = 1
        return {"text_embedding": stored, "text_mask": mask}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        return pipe.vae.encode(pixels).latent_dist.mean * pipe.vae.config.scaling_factor

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone."""
        predictions = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            length = int(micro.conditions["text_mask"][index].sum())
            original, target, crop = (
                torch.tensor([micro.conditions[name][index].tolist()], dtype=torch.float32)
                for name in ("original_size_hw", "target_size_hw", "crop_top_left")
            )
            time = micro.timesteps[index : index + 1]
            one = pipe.transformer(noisy[index][None], text[None, :length], time, original, target, crop)
            predictions.append(one.sample)
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        modules = [f"transformer_blocks.{block}.attn1.{layer}" for block in range(2) for layer in LAYERS]
        return {f"lora_unet_{module.replace('.', '_')}" for module in modules}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(CogView4Case())


def test_the_shift_grows_with_the_square_root_of_the_number_of_tokens(tmp_path: Path) -> None:
    make_tiny_cogview4(tmp_path)
    family = load_family(tmp_path)
    scheduler = family.noise.load_scheduler()
    half = torch.tensor([0.5], dtype=torch.float64)
    for edge, mu in ((32, 1.0), (128, 0.75 * 4 + 0.25)):
        actual = family.noise.timesteps(scheduler, half, (16, edge, edge)).item()
        assert actual == pytest.approx(1000 * mu / (mu + 1), abs=1e-2)


def test_a_long_caption_has_as_many_tokens_as_in_the_pipeline(tmp_path: Path) -> None:
    make_tiny_cogview4(tmp_path)
    family = load_family(tmp_path)
    caption = "a cat " * family.max_length()
    encoded = family.text.encode_caption(family.text.load("float32", "cpu"), caption)
    with torch.no_grad():
        expected = CogView4Case().embed(CogView4Pipeline.from_pretrained(tmp_path), caption)
    assert len(encoded.tensors["text_embedding"]) == expected["text_mask"].sum() == family.max_length()
