"""Codecs of each class of VAE: their scaling of latents, and channels-last convolutions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo.tiny_models import TINY
from pipeline.errors import ModelError
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.loading import load_component
from pipeline.models.worker.vae import FrameCodec
from tests.tiny_models import TinyModel

VAES = ["Stable Diffusion XL", "Qwen-Image", "Qwen-Image 2.1", "Bria FIBO", "Sana", "FLUX.2 klein"]
"""Kinds of models with different classes of VAEs."""

TOLERANCE = 1e-4
"""Largest difference of a latent from torch's usual order, relative to the latents' standard deviation.

float16, in which latents are stored, rounds values of this size by up to 2.4e-4.
"""


@pytest.fixture
def family(tiny_model: TinyModel, request: pytest.FixtureRequest) -> WorkerFamily:
    return load_family(tiny_model(request.param))


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


@pytest.mark.parametrize("family", [each for each in VAES if each != "Qwen-Image 2.1"], indirect=True)
def test_posterior_and_picture_are_those_of_diffusers(family: WorkerFamily) -> None:
    """Sana's VAE has no distribution, and Qwen-Image's encodes a video of one frame.

    The pipeline of Qwen-Image 2.1 adds an opacity first; the tests of its family compare with it.
    """
    vae: Any = family.vae.load("float32", "cpu")
    is_video = isinstance(family.vae, FrameCodec)
    images = pixels(2).unsqueeze(2) if is_video else pixels(2)
    with torch.inference_mode():
        encoded = vae.encode(images)
        is_exact = not hasattr(encoded, "latent_dist")
        mean = encoded.latent if is_exact else encoded.latent_dist.mean
        std = torch.zeros_like(mean) if is_exact else encoded.latent_dist.std
        picture = vae.decode(mean).sample

    posterior = family.vae.posterior(vae, pixels(2))
    raw, deviation, decoded = (each.squeeze(2) if is_video else each for each in (mean, std, picture))
    assert posterior.std.shape == posterior.mean.shape == raw.shape
    torch.testing.assert_close(posterior.mean, raw, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(posterior.std, deviation, rtol=1e-3, atol=1e-6)
    shown = family.vae.decode(vae, family.vae.normalise(raw))
    assert shown.shape == (2, 3, 64, 96)
    torch.testing.assert_close(shown, decoded, rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", VAES, indirect=True)
def test_a_batch_differs_from_its_images_alone_by_less_than_the_tolerance(family: WorkerFamily) -> None:
    vae = family.vae.load("float32", "cpu")
    images = pixels(4)
    together = family.vae.posterior(vae, images).mean
    alone = torch.cat([family.vae.posterior(vae, image[None]).mean for image in images])
    assert float((together - alone).abs().max()) < TOLERANCE * float(alone.std())


MEAN, STD = [0.25, -0.5, 1.5, -2.0] * 4, [0.5, 2.0, 4.0, 8.0] * 4
"""Statistics of up to 16 channels, exact in float32."""

SCALED = {"scaling_factor": 2.0, "shift_factor": 0.5}


def by_channel(raw: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values[: raw.shape[1]])[:, None, None] for values in (MEAN, STD))
    return mean, std


def scaled_by_channel(raw: Tensor) -> Tensor:
    mean, std = by_channel(raw)
    return (raw - mean) * 2.0 / std


def one_frame(raw: Tensor) -> Tensor:
    mean, std = by_channel(raw)
    return (raw - mean) / std


FORMULAS: dict[str, tuple[str, dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "scale and shift": ("FLUX.1 dev", SCALED, lambda raw: (raw - 0.5) * 2.0),
    "scale without a shift": ("Sana", {"scaling_factor": 2.0}, lambda raw: raw * 2.0),
    "no shift": ("FLUX.1 dev", {"shift_factor": None, "scaling_factor": 2.0}, lambda raw: raw * 2.0),
    "a shift that the pipeline ignores": ("Kandinsky 5 (image)", SCALED, lambda raw: raw * 2.0),
    "the mean and deviation of a channel": (
        "Stable Diffusion XL",
        {"latents_mean": MEAN[:4], "latents_std": STD[:4], "scaling_factor": 2.0},
        scaled_by_channel,
    ),
    "only the mean of a channel": (
        "Stable Diffusion XL",
        {"latents_mean": MEAN[:4], "scaling_factor": 2.0},
        lambda raw: raw * 2.0,
    ),
    "the mean and deviation of a video's channel": (
        "Qwen-Image",
        {"latents_mean": MEAN, "latents_std": STD},
        one_frame,
    ),
}
"""Configurations of VAEs, with diffusers' formula from a raw latent to a latent."""


def with_vae_config(folder: Path, values: dict[str, Any]) -> WorkerFamily:
    file = folder / "vae" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return load_family(folder)


@pytest.mark.parametrize("name", FORMULAS)
def test_latents_are_normalised_and_denormalised_by_diffusers_formula(tmp_path: Path, name: str) -> None:
    kind, config, formula = FORMULAS[name]
    TINY[kind](tmp_path)
    family = with_vae_config(tmp_path, config)
    channels = family.spec.latents.channels(family.model)
    raw = torch.randn(2, channels, 4, 6, generator=torch.Generator().manual_seed(1))
    latent = family.vae.normalise(raw)
    torch.testing.assert_close(latent, formula(raw))
    torch.testing.assert_close(family.vae.denormalise(latent), raw)


def test_a_vae_without_a_scaling_factor_has_that_of_stable_diffusion(tiny_sd: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_sd, tmp_path / "base")
    file = tmp_path / "base" / "vae" / "config.json"
    config = json.loads(file.read_text())
    del config["scaling_factor"]
    file.write_text(json.dumps(config))
    raw = torch.randn(1, 4, 2, 2)
    torch.testing.assert_close(load_family(tmp_path / "base").vae.normalise(raw), raw * 0.18215)


@pytest.mark.parametrize(
    ("kind", "channels_last", "floor"),
    [("FLUX.2 klein", False, 0.25), ("ERNIE-Image", False, 1e-5), ("Ideogram 4", True, 0.25)],
)
def test_each_value_of_a_patch_is_normalised_by_its_own_running_statistics(
    tmp_path: Path, kind: str, channels_last: bool, floor: float
) -> None:
    TINY[kind](tmp_path)
    (file,) = (tmp_path / "vae").glob("*.safetensors")
    weights = load_file(file)
    num_values = len(weights["bn.running_mean"])
    mean = torch.arange(num_values, dtype=torch.float32)
    var = torch.arange(num_values, dtype=torch.float32) * 1e-5
    save_file({**weights, "bn.running_mean": mean, "bn.running_var": var}, file, {"format": "pt"})
    family = with_vae_config(tmp_path, {"batch_norm_eps": 0.25})

    channels = num_values // 4
    raw = torch.randn(2, channels, 4, 6, generator=torch.Generator().manual_seed(1))
    expected = torch.empty(2, num_values, 2, 3)
    for channel in range(channels):
        for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
            place = 2 * row + column
            value = place * channels + channel if channels_last else 4 * channel + place
            plane = raw[:, channel, row::2, column::2]
            expected[:, value] = (plane - mean[value]) / (var[value] + floor) ** 0.5
    latent = family.vae.normalise(raw)
    torch.testing.assert_close(latent, expected)
    torch.testing.assert_close(family.vae.denormalise(latent), raw, rtol=1e-4, atol=1e-4)


def test_a_patched_vae_without_running_statistics_is_an_error(tmp_path: Path) -> None:
    TINY["FLUX.2 klein"](tmp_path)
    (file,) = (tmp_path / "vae").glob("*.safetensors")
    weights = load_file(file)
    for name in ("bn.running_mean", "bn.running_var"):
        save_file({key: value for key, value in weights.items() if key != name}, file, {"format": "pt"})
        with pytest.raises(ModelError, match="running mean and variance"):
            load_family(tmp_path).vae.normalise(torch.zeros(1, len(weights[name]) // 4, 2, 2))
