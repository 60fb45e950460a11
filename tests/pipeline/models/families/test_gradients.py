"""The default adapters of every family learn."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from demo.tiny_models import TINY
from pipeline.images.geometry import Size
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.worker.adapter.lora import add_lora, lora_modules
from tests.tiny_models import TinyModel

# diffusers' Chroma imports a class from a deprecated path; its ChatGLM calls a deprecated function of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

SILENT = {"Stable Diffusion 3 and 3.5": {"transformer_blocks.2.attn.add_q_proj"}}
"""Adapters with a gradient of zero: the text query of the last block, because its text output is unused. In
kohya's layout it shares a layer with key and value, which learn, and DoRA needs the complete layer."""

CAPTIONS = ("a cat", "a white cat on a brick wall")


@pytest.mark.parametrize("kind", TINY)
def test_every_default_adapter_gets_a_gradient_in_one_backward_pass(tiny_model: TinyModel, kind: str) -> None:
    family = load_family(tiny_model(kind))
    denoiser = family.denoiser.load("float32", "cpu")
    add_lora(cast("Any", denoiser), LoraSettings(rank=2), targets=family.lora_targets(), seed=1)
    backward(family, denoiser.train())
    weights = {name: weight for name, weight in denoiser.named_parameters() if weight.requires_grad}
    assert [name for name, weight in weights.items() if weight.grad is None] == []
    layers = {name: cast("Any", module) for name, module in lora_modules(denoiser)}
    still = {name for name, layer in layers.items() if not layer.lora_B["default"].weight.grad.any()}
    assert still == SILENT.get(kind, set())


def backward(family: WorkerFamily, denoiser: torch.nn.Module) -> None:
    """Compute the gradient of the family's loss on two samples of noise."""
    encoders = family.text.load("float32", "cpu")
    texts = [family.text.encode_caption(encoders, caption).tensors for caption in CAPTIONS]
    size, count = Size(64, 64), len(CAPTIONS)
    shape, draw = family.latent_shape(size), torch.Generator().manual_seed(1)
    latent, noise = (torch.randn(count, *shape, generator=draw) for _ in range(2))
    scheduler = family.noise.load_scheduler()
    timesteps = family.noise.timesteps(scheduler, torch.tensor([0.3, 0.7], dtype=torch.float64), shape)
    sizes = {name: torch.tensor([tuple(size)] * count) for name in ("original_size_hw", "target_size_hw")}
    conditions = {**family.text.stack(texts), **sizes, "crop_top_left": torch.zeros(count, 2)}
    noisy = family.noise.add_noise(scheduler, latent, noise, timesteps)
    prediction = family.denoiser.predict(denoiser, noisy, timesteps, conditions)
    (prediction - family.noise.target(scheduler, latent, noise, timesteps)).square().mean().backward()
