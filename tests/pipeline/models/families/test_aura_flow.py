from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import AuraFlowPipeline

from demo.tiny_models import make_tiny_aura_flow
from demo.tiny_models.parts import write_json
from pipeline.errors import BucketError
from pipeline.images.geometry import Size
from pipeline.models.diffusers_folder import read_json
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

SINGLE = ("to_q", "to_k", "to_v", "to_out.0")
JOINT = (*SINGLE, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


class AuraFlowCase(Case):
    pipeline_class = AuraFlowPipeline
    targets: ClassVar[list[str]] = [f"attn.{layer}" for layer in JOINT]

    def make(self, folder: Path) -> None:
        make_tiny_aura_flow(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        return {"text_embedding": pipe.encode_prompt(caption, do_classifier_free_guidance=False)[0]}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        return pipe.vae.encode(pixels).latent_dist.mean * pipe.vae.config.scaling_factor

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        text = micro.conditions["text_embedding"]
        return pipe.transformer(noisy, text, micro.timesteps / 1000).sample

    def kohya_keys(self) -> set[str]:
        joint = {f"joint_transformer_blocks.{block}.attn.{layer}" for block in range(2) for layer in JOINT}
        single = {f"single_transformer_blocks.{block}.attn.{layer}" for block in range(2) for layer in SINGLE}
        return {f"lora_unet_{module.replace('.', '_')}" for module in joint | single}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(AuraFlowCase())


def test_a_size_beyond_the_position_table_is_an_error(tmp_path: Path) -> None:
    make_tiny_aura_flow(tmp_path)
    assert load_family(tmp_path).latent_shape(Size(192, 64)) == (4, 24, 8)
    with pytest.raises(BucketError, match="64x208"):
        load_family(tmp_path).latent_shape(Size(64, 208))


def test_the_tokenizer_decides_on_which_side_captions_are_padded(tmp_path: Path) -> None:
    base, other = tmp_path / "base", tmp_path / "other"
    make_tiny_aura_flow(base)
    make_tiny_aura_flow(other)
    path = other / "tokenizer" / "tokenizer_config.json"
    write_json(path, {**read_json(path), "padding_side": "right"})
    text = {"text_embedding": torch.ones(3, 32)}
    for component_folders, full in (({}, slice(-3, None)), ({"tokenizer": path.parent}, slice(0, 3))):
        stacked = load_family(base, component_folders).text.stack([text])["text_embedding"][0]
        assert stacked[full].sum() == stacked.sum() == 3 * 32
