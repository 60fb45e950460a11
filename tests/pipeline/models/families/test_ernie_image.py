from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import ErnieImagePipeline

from demo.tiny_models import make_tiny_ernie_image
from demo.tiny_models.parts import write_json
from pipeline.models.diffusers_folder import read_json
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

# numpy 2 deprecates how torch converts the tensor that diffusers' pipeline passes to its scheduler.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

LAYERS = tuple(f"self_attention.{end}" for end in ("to_q", "to_k", "to_v", "to_out.0"))
LAYERS += ("mlp.gate_proj", "mlp.up_proj", "mlp.linear_fc2")


class ErnieImageCase(Case):
    pipeline_class = ErnieImagePipeline
    targets: ClassVar[list[str]] = list(LAYERS)
    drawing: ClassVar[dict[str, Any]] = {"use_pe": False}

    def make(self, folder: Path) -> None:
        make_tiny_ernie_image(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        states = pipe.encode_prompt(caption, "cpu")[0]
        return {"text_embedding": states[None], "text_mask": torch.ones(1, len(states))}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Return the latent that the end of the pipeline converts back to the raw latent."""
        raw = pipe.vae.encode(pixels).latent_dist.mean
        patches = torch.nn.functional.pixel_unshuffle(raw, 2)
        mean, variance = (each[:, None, None] for each in (pipe.vae.bn.running_mean, pipe.vae.bn.running_var))
        return (patches - mean) / (variance + 1e-5).sqrt()

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone, without padding tokens."""
        predictions = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            length = int(micro.conditions["text_mask"][index].sum())
            time = micro.timesteps[index : index + 1]
            lengths = torch.tensor([length])
            predictions.append(
                pipe.transformer(noisy[index][None], time, text[None, :length], lengths).sample
            )
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        modules = [f"layers.{block}.{layer}" for block in range(2) for layer in LAYERS]
        return {f"lora_unet_{module.replace('.', '_')}" for module in modules}

    def comfyui_keys(self, modules: set[str]) -> set[str]:
        return {f"diffusion_model.{module}" for module in modules}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(ErnieImageCase())


def test_a_tokenizer_without_a_limit_gets_one(tmp_path: Path) -> None:
    make_tiny_ernie_image(tmp_path)
    assert load_family(tmp_path).max_length() == 256
    path = tmp_path / "tokenizer" / "tokenizer_config.json"
    write_json(path, {**read_json(path), "model_max_length": 1000000000000000019884624838656})
    family = load_family(tmp_path)
    assert family.text_shapes() == {"text_embedding": (2048, 48)}
    assert family.text.load("float32", "cpu").tokenizer.model_max_length == 2048
