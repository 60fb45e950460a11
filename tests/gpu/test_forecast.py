"""The memory forecast against a step on a GPU, for a FLUX.1 of few blocks but the published width."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.gpu.configurations import PUBLISHED
from pipeline.images.geometry import Size
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.loading import component_class
from pipeline.recipe import recipe_from_mapping
from pipeline.trained_lora.worker.adapter.lora import add_lora, trainable_weights
from pipeline.trained_lora.worker.loss import sample_losses
from pipeline.trained_lora.worker.memory.training import TrainingForecast

pytestmark = pytest.mark.gpu

SIZE = Size(1024, 1024)
SHALLOW = {"num_layers": 2, "num_single_layers": 4}


def recipe_of(folder: Path, *, checkpointing: bool) -> Any:
    return recipe_from_mapping(
        "memory",
        {
            "datasets": [{"name": "photos", "path": str(folder / "photos")}],
            "output_dir": str(folder / "out"),
            "model": {"base": str(folder / "model")},
            "training": {"gradient_checkpointing": checkpointing, "lora": {"rank": 16, "alpha": 16.0}},
            "accelerate": {"mixed_precision": "bf16"},
        },
    )


def measured_bytes(family: WorkerFamily, recipe: Any, device: str) -> int:
    """Return the peak of a step, the second one, after which gradients and the optimizer's state exist."""
    kind = component_class(family, family.spec.denoiser_name)
    with torch.device(device):
        denoiser: nn.Module = kind.from_config(family.denoiser_config).bfloat16().requires_grad_(False)
    add_lora(denoiser, recipe.training.lora, targets=family.lora_targets(), seed=0)  # pyright: ignore
    if recipe.training.gradient_checkpointing:
        family.denoiser.recompute_activations(denoiser)
    denoiser.train()
    optimizer = torch.optim.AdamW(trainable_weights(denoiser))
    latent = torch.randn(1, *family.latent_shape(SIZE), device=device)
    texts = {name: torch.randn(1, *shape, device=device) for name, shape in family.text_shapes().items()}
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast(device, torch.bfloat16):
            prediction = family.denoiser.predict(
                denoiser, latent, torch.tensor([500.0], device=device), texts
            )
            loss = sample_losses(prediction, latent, recipe.training.loss).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_forecast_of_a_step_is_what_the_gpu_allocates(
    cuda: str, tmp_path: Path, *, checkpointing: bool
) -> None:
    published = next(each for each in PUBLISHED if each.name == "FLUX.1 dev")
    transformer = {**published.networks["transformer"], **SHALLOW}
    shallow = replace(published, networks={**published.networks, "transformer": transformer})
    family = load_family(shallow.write(tmp_path / "model"))
    recipe = recipe_of(tmp_path, checkpointing=checkpointing)
    forecast = TrainingForecast(family, recipe, SIZE)
    before = torch.cuda.memory_allocated()
    measured = measured_bytes(family, recipe, cuda) - before
    assert forecast.memory(forecast.variant).device == pytest.approx(measured, rel=0.15)
