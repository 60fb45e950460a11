"""Training of the UNet together with its text encoder, on latents that the VAE encoded once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from demo.pretraining.autoencoder import as_pixels
from demo.pretraining.loop import Part, Stage, train
from demo.pretraining.networks import new_scheduler
from demo.world import draw_scene, random_scenes

BATCH = 32
NUM_PICTURES = 8192
"""Number of different pictures that the UNet is trained on."""

_DOODLES = 0.15

_NO_CAPTION = 0.1
"""Fraction of pictures that are shown with an empty caption, for guidance."""


@dataclass(frozen=True)
class EncodedWorld:
    """Pictures and captions that the VAE and the tokenizer have encoded.

    Attributes:
        latents: Latents (N, 4, h, w) with a standard deviation of 1.
        tokens: Tokens (N, T) of their captions.
        empty: Tokens (T,) of an empty caption.
        scaling_factor: Factor that the VAE's latents were multiplied by.
    """

    latents: Tensor
    tokens: Tensor
    empty: Tensor
    scaling_factor: float


def load_world(
    vae: Any, tokenizer: Any, file: Path, *, seed: int, number: int = NUM_PICTURES
) -> EncodedWorld:
    """Return random pictures and captions of the world, encoded in an earlier call if `file` exists."""
    if not file.exists():
        latents, captions = _encode(vae, seed, number)
        partial = file.with_suffix(".partial")
        save_file({"latents": latents, "tokens": as_tokens(tokenizer, captions)}, partial)
        partial.replace(file)

    stored = load_file(file)
    factor = 1 / float(stored["latents"].std())
    empty = as_tokens(tokenizer, [""])[0]
    return EncodedWorld(stored["latents"] * factor, stored["tokens"], empty, factor)


def as_tokens(tokenizer: Any, captions: list[str]) -> Tensor:
    """Return the captions' tokens (B, T), padded to the tokenizer's length."""
    return tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt")["input_ids"]


def train_denoiser(networks: Mapping[str, Any], world: EncodedWorld, stage: Stage, part: Part) -> None:
    """Train a UNet and a text encoder to predict the velocity of https://arxiv.org/abs/2202.00512.

    The levels of noise are stratified over the batch. Their density grows linearly with the noise, because
    the content of a picture is decided at the highest levels.

    Args:
        networks: The networks "unet" and "text_encoder".
        world: Pictures and captions.
        stage: The stage.
        part: This process's part of every batch.
    """
    unet, text_encoder = networks["unet"], networks["text_encoder"]
    unet.to(memory_format=torch.channels_last)
    scheduler: Any = new_scheduler()
    num_timesteps = scheduler.config.num_train_timesteps

    def loss_at(step: int) -> Tensor:
        # Every process draws the complete batch, so that the number of processes does not change it.
        generator = part.generator(step)
        rows = torch.randint(len(world.latents), (BATCH,), generator=generator)[part.rows]
        levels = ((torch.arange(BATCH) + torch.rand(BATCH, generator=generator)) / BATCH).sqrt()[part.rows]
        no_caption = (torch.rand(BATCH, generator=generator) < _NO_CAPTION)[part.rows]
        noise = torch.randn(BATCH, *world.latents.shape[1:], generator=generator)[part.rows]

        latents, timesteps = world.latents[rows], (levels * num_timesteps).long()
        noisy = scheduler.add_noise(latents, noise, timesteps)
        tokens = torch.where(no_caption[:, None], world.empty, world.tokens[rows])
        predicted = unet(noisy, timesteps, text_encoder(tokens)[0]).sample
        return functional.mse_loss(predicted, scheduler.get_velocity(latents, noise, timesteps))

    train(stage, networks, loss_at)


@torch.inference_mode()
def _encode(vae: Any, seed: int, number: int) -> tuple[Tensor, list[str]]:
    """Return the latents (N, 4, h, w) of random pictures, unscaled, and their captions."""
    random = np.random.default_rng([seed, 1])
    world = islice(random_scenes(random, doodles=_DOODLES), number)
    latents: list[Tensor] = []
    captions: list[str] = []
    while batch := list(islice(world, BATCH)):
        captions += [scene.caption for scene in batch]
        pixels = as_pixels(np.stack([draw_scene(scene, random) for scene in batch]))
        latents.append(vae.encode(pixels).latent_dist.mode().contiguous())
    return torch.cat(latents), captions
