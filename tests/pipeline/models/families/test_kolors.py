from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler

from demo.tiny_models import make_tiny_kolors
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.sized_unet_case import ATTENTIONS, LAYERS, SizedUNetCase

# numpy 2 deprecates how diffusers' Euler schedule converts a tensor to an array. diffusers' ChatGLM, which a
# test imports on use, calls a deprecated function of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]


class KolorsCase(SizedUNetCase):
    @property
    def pipeline_class(self) -> Any:
        from diffusers import KolorsPipeline

        return KolorsPipeline

    def make(self, folder: Path) -> None:
        make_tiny_kolors(folder)

    def pooled_width(self, pipe: Any) -> int:
        return pipe.text_encoder.config.hidden_size

    def noisy(self, pipe: Any, micro: MicroInput) -> torch.Tensor:
        return DDPMScheduler.from_config(pipe.scheduler.config).add_noise(
            micro.latent, micro.noise, micro.timesteps
        )

    def kohya_keys(self) -> set[str]:
        modules = [f"{place}.{layer}" for place in ATTENTIONS for layer in LAYERS]
        return {f"lora_unet_{module.replace('.', '_')}" for module in modules}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(KolorsCase())


def test_C05_the_cut_is_reported_in_characters_not_bytes(tmp_path: Path) -> None:
    make_tiny_kolors(tmp_path)
    family = load_family(tmp_path)
    encoders = family.text.load("float32", "cpu")
    fits = "é" + " cat" * 252  # 256 tokens with two marks, a space and one letter
    assert family.text.encode_caption(encoders, fits).num_cut == 0
    encoded = family.text.encode_caption(encoders, fits + " cup photo")
    assert (encoded.num_tokens, encoded.num_cut) == (258, 2)
    assert encoded.cut_from is not None
    assert (fits + " cup photo")[encoded.cut_from :].strip() == "cup photo"
