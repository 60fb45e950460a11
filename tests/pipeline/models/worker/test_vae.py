"""Channels-last VAEs of each class, compared with the same VAE in torch's usual order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo.tiny_models import TINY
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.loading import load_component

VAES = ["Stable Diffusion XL", "Qwen-Image", "Qwen-Image 2.1", "Bria FIBO", "Sana", "FLUX.2 klein"]
"""Kinds of models with different classes of VAEs."""

TOLERANCE = 1e-4
"""Largest difference of a latent from torch's usual order, relative to the latents' standard deviation.

float16, in which latents are stored, rounds values of this size by up to 2.4e-4.
"""


@pytest.fixture
def family(tmp_path: Path, request: pytest.FixtureRequest) -> WorkerFamily:
    TINY[request.param](tmp_path / "tiny")
    return load_family(tmp_path / "tiny")


def pixels(count: int) -> torch.Tensor:
    return torch.rand(count, 3, 64, 96, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.mark.parametrize("family", VAES, indirect=True)
def test_a_channels_last_vae_agrees_with_the_usual_order_in_both_directions(family: WorkerFamily) -> None:
    vae = family.vae.load("float32", "cpu")
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    kernels = {name: weight for name, weight in vae.named_parameters() if weight.dim() in formats}
    assert kernels
    assert [
        name
        for name, weight in kernels.items()
        if not weight.is_contiguous(memory_format=formats[weight.dim()])
    ] == []

    plain = load_component(family, "vae", "float32", "cpu")
    actual = family.vae.posterior(vae, pixels(2))
    with torch.inference_mode():
        expected = family.vae._encode(plain, pixels(2))  # `posterior` would turn the pixels, too
    scale = float(expected.mean.std())
    assert float((actual.mean - expected.mean).abs().max()) < TOLERANCE * scale
    assert float((actual.std - expected.std).abs().max()) <= TOLERANCE * scale

    latent = family.vae.normalise(expected.mean)
    decoded, picture = family.vae.decode(vae, latent), family.vae.decode(plain, latent)
    assert float((decoded - picture).abs().max()) < TOLERANCE * float(picture.std())


@pytest.mark.parametrize("family", VAES, indirect=True)
def test_a_batch_differs_from_its_images_alone_by_less_than_the_tolerance(family: WorkerFamily) -> None:
    vae = family.vae.load("float32", "cpu")
    images = pixels(4)
    together = family.vae.posterior(vae, images).mean
    alone = torch.cat([family.vae.posterior(vae, image[None]).mean for image in images])
    assert float((together - alone).abs().max()) < TOLERANCE * float(alone.std())
