"""Every family on a GPU: latents, decoded pixels and a training step agree with those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from demo.tiny_models import TINY
from pipeline.images.geometry import Size
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.processes.worker.devices import allow_tf32
from pipeline.recipe import LoraSettings, LossSettings
from pipeline.trained_lora.worker.adapter.lora import add_lora, trainable_weights
from pipeline.trained_lora.worker.loss import sample_losses

# diffusers' Chroma imports a class from a deprecated path; its ChatGLM calls a deprecated function of torch.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

SIZE = Size(64, 64)

TF32 = 2e-2
"""Largest difference relative to the largest value: factors of 10 bits, over the layers of a tiny network."""


@pytest.fixture
def family(request: pytest.FixtureRequest, model_folder: Path) -> WorkerFamily:
    folder = model_folder / str(list(TINY).index(request.param))
    if not folder.exists():
        TINY[request.param](folder)
    return load_family(folder)


def assert_close(actual: Tensor, expected: Tensor, share: float = TF32) -> None:
    expected = expected.double()
    difference = (actual.double().cpu() - expected).abs().max()
    assert float(difference) <= share * float(expected.abs().max())


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conditions_of(family: WorkerFamily, device: str) -> dict[str, Any]:
    """Return conditions of two samples, the second with a shorter caption if padding is masked."""
    shapes = family.text_shapes()
    values: dict[str, Any] = {
        name: normal(2, *shape, seed=number).to(device) for number, (name, shape) in enumerate(shapes.items())
    }
    for name, size in (("original_size_hw", 64), ("crop_top_left", 0), ("target_size_hw", 64)):
        values[name] = torch.full((2, 2), size, device=device)
    length = shapes["text_embedding"][0]
    if "text_mask" in shapes:
        values["text_mask"] = torch.ones(2, *shapes["text_mask"], device=device)
    if family.spec.text.padding == "masked":
        lengths = (length, max(1, length // 2))
        values["text_lengths"] = lengths
        positions = torch.arange(length)
        values["text_mask"] = torch.stack([positions < each for each in lengths]).float().to(device)
    return values


def step(family: WorkerFamily, device: str) -> tuple[Tensor, list[Tensor]]:
    """Return the losses and the adapter's gradients of one step in float32."""
    allow_tf32(device)
    denoiser = family.denoiser.load("float32", device)
    add_lora(cast("Any", denoiser), LoraSettings(rank=4, alpha=4.0), targets=family.lora_targets(), seed=0)
    weights = trainable_weights(denoiser)
    with torch.no_grad():
        for number, weight in enumerate(weights):
            weight.copy_(0.05 * normal(*weight.shape, seed=number))
    latent, noise = (normal(2, *family.latent_shape(SIZE), seed=seed).to(device) for seed in (100, 101))
    scheduler = family.noise.load_scheduler()
    timesteps = torch.tensor([250.0, 750.0], device=device)
    if family.prediction_type() != "flow":
        timesteps = timesteps.long()
    noisy = family.noise.add_noise(scheduler, latent, noise, timesteps)
    target = family.noise.target(scheduler, latent, noise, timesteps)
    prediction = family.denoiser.predict(denoiser, noisy, timesteps, conditions_of(family, device))
    losses = sample_losses(prediction, target, LossSettings())
    losses.sum().backward()
    return losses.detach().cpu(), [weight.grad.cpu() for weight in weights if weight.grad is not None]


@pytest.mark.parametrize("family", TINY, indirect=True)
def test_latents_and_decoded_pixels_are_those_of_the_cpu(device: str, family: WorkerFamily) -> None:
    allow_tf32(device)
    pixels = normal(2, 3, SIZE.height, SIZE.width, seed=0).clamp(-1, 1)
    expected = family.vae.load("float32", "cpu")
    on_device = family.vae.load("float32", device)
    posterior = family.vae.posterior(expected, pixels)
    assert_close(family.vae.posterior(on_device, pixels).mean, posterior.mean)

    latent = family.vae.normalise(posterior.mean)[:1]
    assert_close(family.vae.decode(on_device, latent), family.vae.decode(expected, latent))


@pytest.mark.parametrize("family", TINY, indirect=True)
def test_losses_and_gradients_of_a_step_are_those_of_the_cpu(device: str, family: WorkerFamily) -> None:
    losses, gradients = step(family, device)
    expected_losses, expected_gradients = step(family, "cpu")
    assert_close(losses, expected_losses)
    largest = max(float(each.abs().max()) for each in expected_gradients)
    assert largest > 0
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        # Small gradients are sums of large terms, so each is compared on the scale of the largest.
        assert float((actual - expected).abs().max()) <= 5 * TF32 * largest
