from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

from demo.tiny_models import make_tiny_flux2_dev, make_tiny_flux2_klein
from pipeline.models.worker.family import load_family
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.flux2_case import Flux2Case, ReferenceTests


class KleinCase(Flux2Case):
    pipeline_class = Flux2KleinPipeline
    guidance = None

    def make(self, folder: Path) -> None:
        make_tiny_flux2_klein(folder)

    def negative_prompt(self, pipe: Any, text: str) -> dict[str, Any]:
        """Return the negative prompt as embeddings, because the pipeline takes no text for it."""
        return {"negative_prompt_embeds": pipe.encode_prompt(text)[0]}


def test_the_complete_job_of_klein_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(KleinCase())


@pytest.mark.parametrize("make", [make_tiny_flux2_klein, make_tiny_flux2_dev])
def test_E08_training_uses_the_shift_of_the_schedule_and_not_that_of_50_steps(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path)
    family = load_family(tmp_path)
    scheduler = family.noise.load_scheduler()
    half = torch.tensor([0.5], dtype=torch.float64)
    for edge, mu in ((16, 0.5), (64, 1.15)):  # 256 and 1024 px
        actual = family.noise.timesteps(scheduler, half, (32, edge, edge)).item()
        assert actual == pytest.approx(1000 / (1 + math.exp(-mu)), abs=1e-2)
        drawn = 1000 / (1 + math.exp(-compute_empirical_mu(edge * edge, num_steps=50)))
        assert drawn - actual > 100


class TestReferences(ReferenceTests):
    case = KleinCase()
