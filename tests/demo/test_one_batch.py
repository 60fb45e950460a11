"""Each kind of adapter learns one batch of the demo, and its exported file predicts the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from demo.adapter_kinds import KINDS, RATES
from demo.concept_pictures import concept_scenes
from demo.learned import load_adapter, load_pipeline
from demo.world import draw_scene
from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings, project_root
from pipeline.trained_lora.worker.adapter.lora import adapted_networks, add_lora, trainable_weights
from pipeline.trained_lora.worker.adapter.weight_norms import norm_limit
from pipeline.trained_lora.worker.export.exporter import Exporter

BASE = project_root() / "demo" / "base"
STEPS = 200

MAX_SHARE = 0.1
"""Largest loss after the steps, divided by the first one. An adapter that is not trained has 1."""


class Batch(NamedTuple):
    """Noisy latents of the concept, one at each of 8 timesteps, and what the model should predict."""

    noisy: Tensor
    timesteps: Tensor
    texts: Tensor
    target: Tensor

    def loss(self, unet: Any) -> Tensor:
        """Return the mean squared error of a UNet's prediction."""
        return torch.nn.functional.mse_loss(self.predict(unet), self.target)

    def predict(self, unet: Any) -> Tensor:
        """Return a UNet's prediction."""
        return unet(self.noisy, self.timesteps, self.texts).sample


@torch.no_grad()
def one_batch(pipe: Any) -> Batch:
    """Return the same batch at every call."""
    scenes = concept_scenes()[:8]
    pictures = np.stack([draw_scene(scene, np.random.default_rng(0)) for scene in scenes])
    pixels = torch.from_numpy(pictures).movedim(3, 1).float() / 127.5 - 1
    latents = pipe.vae.encode(pixels).latent_dist.mean * pipe.vae.config.scaling_factor
    tokens = pipe.tokenizer(
        [scene.caption for scene in scenes], padding="max_length", return_tensors="pt"
    ).input_ids
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    timesteps = torch.arange(100, 900, 100)
    return Batch(
        pipe.scheduler.add_noise(latents, noise, timesteps),
        timesteps,
        pipe.text_encoder(tokens)[0],
        pipe.scheduler.get_velocity(latents, noise, timesteps),
    )


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tlora"])
def test_an_adapter_learns_one_batch_and_its_file_predicts_the_same(kind: str, tmp_path: Path) -> None:
    # T-LoRA differs from a LoRA in the training loop only.
    batch = one_batch(load_pipeline(BASE))
    family = load_family(BASE)
    unet = cast("Any", family.denoiser.load("float32", "cpu"))
    lora = LoraSettings.model_validate({"targets": "blocks", **KINDS[kind]})
    add_lora(unet, lora, targets=family.lora_targets(), seed=0)
    networks = adapted_networks(unet, {})
    limit = norm_limit(networks.values(), lora)
    optimizer = torch.optim.AdamW(trainable_weights(unet), lr=RATES[kind][1])

    first = float(batch.loss(unet).detach())
    for _ in range(STEPS):
        optimizer.zero_grad()
        batch.loss(unet).backward()
        optimizer.step()
        if limit is not None:
            limit.apply()
    assert float(batch.loss(unet).detach()) <= MAX_SHARE * first

    Exporter(family, "demo", {}).export(networks, tmp_path)
    pipe = load_pipeline(BASE)
    load_adapter(pipe, tmp_path)
    with torch.no_grad():
        expected = batch.predict(unet)
        torch.testing.assert_close(batch.predict(pipe.unet), expected, rtol=0, atol=1e-3)
        assert float(batch.loss(pipe.unet)) <= MAX_SHARE * first
