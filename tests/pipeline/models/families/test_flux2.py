from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2KleinPipeline

from demo.tiny_models import make_tiny_flux2_klein
from pipeline.models.worker.family import load_family
from tests.pipeline.models.families.complete_job import Case
from tests.pipeline.models.families.flux2_case import Flux2Case


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


def test_the_shift_equals_the_pipelines(tmp_path: Path) -> None:
    make_tiny_flux2_klein(tmp_path)
    family = load_family(tmp_path)
    scheduler = family.noise.load_scheduler()
    half = torch.tensor([0.5], dtype=torch.float64)
    for edge in (16, 64, 80):  # 64: what the pipeline computes for 1024 px; 80: beyond its 4300 tokens
        actual = family.noise.timesteps(scheduler, half, (32, edge, edge)).item()
        tokens = edge * edge
        slow, fast = 0.00016927 * tokens + 0.45666666, 8.73809524e-05 * tokens + 1.89833333
        mu = slow if tokens > 4300 else slow + (fast - slow) * 150 / 190
        expected = 1000 / (1 + torch.exp(torch.tensor(-mu)).item())
        assert actual == pytest.approx(expected, abs=1e-2)
