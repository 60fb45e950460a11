from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ChromaPipeline

from demo.tiny_models import make_tiny_chroma
from pipeline.images.geometry import Size
from pipeline.models.worker.drawing import PictureSettings
from pipeline.models.worker.family import load_family
from pipeline.recipe import project_root
from pipeline.trained_lora.worker.loader import MicroInput
from tests.pipeline.models.families.complete_job import Case, draw_picture

# diffusers' Chroma imports a class from a deprecated path.
pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")

DOUBLE = ("img_attn_qkv", "img_attn_proj", "img_mlp_0", "img_mlp_2")
DOUBLE += tuple(layer.replace("img", "txt") for layer in DOUBLE)


class ChromaCase(Case):
    pipeline_class = ChromaPipeline
    targets = (
        r"transformer_blocks\.\d+\.(attn\.(to|add)_[qkv](_proj)?|attn\.to_out\.0|attn\.to_add_out"
        r"|ff(_context)?\.net\.(0\.proj|2))|single_transformer_blocks\.\d+\.(attn\.to_[qkv]|proj_mlp|proj_out)"
    )

    def make(self, folder: Path) -> None:
        make_tiny_chroma(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding, _, mask, *_ = pipe.encode_prompt(caption, do_classifier_free_guidance=False)
        return {"text_embedding": embedding, "text_mask": mask}

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone; tokens are 2x2 patches in row order, channels first."""
        height, width = noisy.shape[2:]
        ids = [[0.0, row, column] for row in range(height // 2) for column in range(width // 2)]
        predictions = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            patches = torch.nn.functional.unfold(noisy[index : index + 1], 2, stride=2).transpose(1, 2)
            mask = torch.cat([micro.conditions["text_mask"][index], torch.ones(len(ids))])
            tokens = pipe.transformer(
                patches,
                text[None],
                micro.timesteps[index : index + 1] / 1000,
                torch.tensor(ids),
                torch.zeros(len(text), 3),
                mask[None],
            ).sample
            predictions.append(torch.nn.functional.fold(tokens.transpose(1, 2), (height, width), 2, stride=2))
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        double = {f"lora_unet_double_blocks_{block}_{layer}" for block in range(2) for layer in DOUBLE}
        single = {f"lora_unet_single_blocks_{block}_linear{layer}" for block in range(2) for layer in (1, 2)}
        return double | single


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(ChromaCase())


def test_the_mask_passes_one_padding_token(tmp_path: Path) -> None:
    make_tiny_chroma(tmp_path)
    family = load_family(tmp_path)
    encoded = family.text.encode_caption(family.text.load("float32", "cpu"), "a cat")
    assert encoded.num_tokens == 3
    assert encoded.tensors["text_mask"].tolist() == [1.0] * 4 + [0.0] * 508


def test_a_schedule_with_beta_sigmas_needs_no_additional_package(tmp_path: Path) -> None:
    make_tiny_chroma(tmp_path)
    path = tmp_path / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_beta_sigmas": True}))
    family = load_family(tmp_path)
    assert family.noise.load_scheduler().config.use_beta_sigmas
    encoders = family.text.load("float32", "cpu")
    text, empty = (family.text.encode_caption(encoders, caption).tensors for caption in ("a cat", ""))
    pipeline = family.drawing.load_pipeline(dtype="float32", device="cpu")
    preview = family.drawing.draw(pipeline, text, empty, PictureSettings(Size(64, 64), steps=2, seed=1))
    pipe = ChromaPipeline.from_pretrained(tmp_path)
    expected = draw_picture(ChromaCase(), pipe, guidance_scale=family.guidance_scale)
    np.testing.assert_allclose(np.asarray(preview) / 255, expected, atol=0.6 / 255)
    project = tomllib.loads((project_root() / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert any(each.startswith("scipy") for each in project["dependencies"])  # optional in diffusers
