"""Configurations of published models against their published numbers of weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu.configurations import PUBLISHED
from bench.gpu.published import NUM_WEIGHTS
from pipeline.maintenance.memory.worker.skeletons import skeleton
from pipeline.models.worker.family import load_family

EXACT = {
    "SDXL": NUM_WEIGHTS["SDXL"]["unet"],
    "FLUX.1 dev": NUM_WEIGHTS["FLUX.1"]["transformer"],
}

BILLIONS = {"Z-Image": 6, "FLUX.2 klein base 4B": 4, "Qwen-Image": 20, "FLUX.2 dev": 32}
"""Sizes by which the models are known."""


def num_weights(name: str, folder: Path) -> int:
    published = next(each for each in PUBLISHED if each.name == name)
    family = load_family(published.write(folder))
    denoiser = skeleton(family, family.denoiser_name, "bfloat16")
    return sum(weight.numel() for weight in denoiser.parameters())


@pytest.mark.parametrize("name", EXACT)
def test_a_denoiser_has_the_published_number_of_weights(name: str, tmp_path: Path) -> None:
    assert num_weights(name, tmp_path) == EXACT[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_a_denoiser_has_about_the_size_that_the_model_is_known_by(name: str, tmp_path: Path) -> None:
    assert num_weights(name, tmp_path) == pytest.approx(BILLIONS[name] * 1e9, rel=0.1)
