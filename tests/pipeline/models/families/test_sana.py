from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import SanaPipeline

from demo.tiny_models import make_tiny_sana
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

# numpy 2 deprecates how diffusers' solver converts a tensor to an array.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

LAYERS = ("to_q", "to_k", "to_v", "to_out.0")


class SanaCase(Case):
    pipeline_class = SanaPipeline
    targets: ClassVar[list[str]] = list(LAYERS)
    drawing: ClassVar[dict[str, Any]] = {"use_resolution_binning": False}

    def make(self, folder: Path) -> None:
        make_tiny_sana(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        """Return the embeddings that the pipeline computes when it draws."""
        arguments: list[Any] = []
        encode = pipe.encode_prompt

        def record_arguments(*args: Any, **kwargs: Any) -> Any:
            arguments.append(encode(*args, **kwargs))
            raise StopIteration

        pipe.encode_prompt = record_arguments
        try:
            pipe(caption, height=64, width=64, num_inference_steps=1, **self.drawing)
        except StopIteration:
            embedding, mask, empty, empty_mask = arguments[0]
        finally:
            del pipe.encode_prompt
        if not caption:  # the negative prompt's embedding
            embedding, mask = empty, empty_mask
        return {"text_embedding": embedding, "text_mask": mask}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        return pipe.vae.encode(pixels).latent * pipe.vae.config.scaling_factor

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        text, mask = micro.conditions["text_embedding"], micro.conditions["text_mask"]
        times = micro.timesteps
        return pipe.transformer(noisy, text, times, encoder_attention_mask=mask).sample

    def kohya_keys(self) -> set[str]:
        modules = [
            f"transformer_blocks.{block}.attn{number}.{layer}"
            for block in range(2)
            for number in (1, 2)
            for layer in LAYERS
        ]
        return {f"lora_unet_{module.replace('.', '_')}" for module in modules}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(SanaCase())


def test_the_shift_comes_from_the_base_models_solver(tmp_path: Path) -> None:
    make_tiny_sana(tmp_path)
    family = load_family(tmp_path)
    half = torch.tensor([0.5], dtype=torch.float64)
    assert family.noise.timesteps(family.noise.load_scheduler(), half, (32, 2, 2)).item() == 750.0
    assert family.timestep_facts()["flow_shift"] == 3.0


def test_cut_tokens_are_counted_after_the_instruction(tmp_path: Path) -> None:
    make_tiny_sana(tmp_path)
    family = load_family(tmp_path)
    encoders = family.text.load("float32", "cpu")
    caption = "cat" + " cat" * 305
    encoded = family.text.encode_caption(encoders, caption)
    assert family.max_length() == len(encoded.tensors["text_embedding"]) == 300
    assert encoded.num_cut > 0
    assert family.text.encode_caption(encoders, caption[: encoded.cut_from]).num_cut == 0
    same, shorter = (
        family.text.encode_caption(encoders, caption[: (encoded.cut_from or 0) - letters]).tensors[
            "text_embedding"
        ]
        for letters in (0, 4)
    )
    assert torch.equal(same, encoded.tensors["text_embedding"])
    assert not torch.equal(shorter, encoded.tensors["text_embedding"])
