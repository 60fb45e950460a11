"""Training of the VAE on pictures of the world, half of them doodles."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demo.pretraining.loop import Part, Stage, train
from demo.score import Score, score
from demo.world import CONCEPT, Array, draw_scene, random_scenes, scenes

BATCH = 8
_DOODLES = 0.5
_KL_WEIGHT = 2e-4
"""Weight of the mean KL divergence per latent value."""


def train_vae(vae: Any, stage: Stage, part: Part) -> None:
    """Train the VAE on absolute and squared errors and a small KL divergence."""
    vae.to(memory_format=torch.channels_last)

    def loss_at(step: int) -> Tensor:
        random = np.random.default_rng([part.seed, step])
        batch = islice(random_scenes(random, doodles=_DOODLES), BATCH)
        pixels = as_pixels(np.stack([draw_scene(scene, random) for scene in batch])[part.rows])

        posterior = vae.encode(pixels).latent_dist
        noise = torch.randn(BATCH, *posterior.mean.shape[1:], generator=part.generator(step))[part.rows]
        error = vae.decode(posterior.mean + posterior.std * noise).sample - pixels
        divergence = posterior.kl().mean() / posterior.mean[0].numel()
        return error.abs().mean() + error.square().mean() + _KL_WEIGHT * divergence

    train(stage, {"vae": vae}, loss_at)


def as_pixels(pictures: Array) -> Tensor:
    """Return uint8 pictures (B, H, W, 3) as a float tensor (B, 3, H, W) in [-1, 1]."""
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    return pixels.contiguous(memory_format=torch.channels_last)


def as_pictures(pixels: Tensor) -> Array:
    """Return a float tensor (B, 3, H, W) in [-1, 1] as uint8 pictures (B, H, W, 3)."""
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


@torch.inference_mode()
def concept_through_vae(vae: Any, *, seed: int) -> tuple[Score, float]:
    """Return the score of real pictures of the concept after encoding and decoding, and their PSNR in dB."""
    random = np.random.default_rng([seed, 2])
    expected = scenes(CONCEPT) * 4
    pixels = as_pixels(np.stack([draw_scene(scene, random) for scene in expected]))
    decoded = torch.cat([vae.decode(vae.encode(part).latent_dist.mode()).sample for part in pixels.split(16)])
    error = (decoded.clamp(-1, 1) - pixels).square().mean() / 4
    return score(as_pictures(decoded), expected), float(-10 * error.log10())
