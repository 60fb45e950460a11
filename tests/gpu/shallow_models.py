"""Networks of published width and few blocks with random weights, and steps that train an adapter of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from bench.gpu.configurations import PUBLISHED
from pipeline.images.geometry import Size
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.loading import component_class
from pipeline.models.worker.offload.streamed_blocks import streamed_blocks
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.trained_lora.worker.adapter.lora import add_lora, trainable_weights
from pipeline.trained_lora.worker.base_model import stream_denoiser
from pipeline.trained_lora.worker.ema import AveragedWeights
from pipeline.trained_lora.worker.loss import sample_losses
from pipeline.trained_lora.worker.memory.training import TrainingForecast
from pipeline.trained_lora.worker.optimizers import make_optimizer

FEW_BLOCKS: dict[str, dict[str, Any]] = {
    "SDXL": {"transformer_layers_per_block": (1, 1, 2)},
    "FLUX.1 dev": {"num_layers": 2, "num_single_layers": 4},
    "Z-Image": {"n_layers": 4, "n_refiner_layers": 1},
}
"""Changes of the published configurations of denoisers."""


@dataclass(frozen=True)
class Shallow:
    """A base model without weights, and a recipe that trains it in bf16 at one size."""

    family: WorkerFamily
    recipe: Recipe
    size: Size

    @property
    def forecast(self) -> TrainingForecast:
        """Forecast of a step."""
        return TrainingForecast(self.family, self.recipe, self.size)

    def denoiser(self, device: str) -> nn.Module:
        """Return the frozen denoiser with random weights."""
        kind = component_class(self.family, self.family.spec.denoiser_name)
        with torch.device(device):
            return kind.from_config(self.family.denoiser_config).bfloat16().requires_grad_(False)

    def train(
        self, denoiser: nn.Module, device: str, *, offload: Literal["none"] | int, begin: Callable[[], None]
    ) -> None:
        """Run two steps; `begin` is called before each. Gradients and optimizer state exist in the second."""
        training = self.recipe.training
        if offload != "none":
            stream_denoiser(denoiser, offload, device)
        lora, targets = training.lora, self.family.lora_targets()
        add_lora(cast("Any", denoiser), lora, targets=targets, seed=0)
        if training.gradient_checkpointing:
            streamed = streamed_blocks(denoiser)
            self.family.denoiser.recompute_activations(denoiser, streamed and streamed.checkpoint)
        denoiser.train()

        weights = trainable_weights(denoiser)
        optimizer = make_optimizer(weights, training, device=device)
        average = AveragedWeights(weights, optimizer, training)
        latent = torch.randn(1, *self.family.latent_shape(self.size), device=device)
        conditions = {
            name: _on(device, value) for name, value in self.forecast.conditions(batch_size=1).items()
        }
        for _ in range(2):
            begin()
            with torch.autocast(device, torch.bfloat16):
                timestep = torch.tensor([500.0], device=device)
                prediction = self.family.denoiser.predict(denoiser, latent, timestep, conditions)
                loss = sample_losses(prediction, latent, training.loss).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            average.update()


def shallow(
    name: str, folder: Path, size: Size, changes: dict[str, Any] | None = None, **training: Any
) -> Shallow:
    """Return a published model with few blocks; `changes` are further changes of the configuration."""
    published = next(each for each in PUBLISHED if each.name == name)
    role = "unet" if "unet" in published.networks else "transformer"
    config = {**published.networks.get(role, {}), **FEW_BLOCKS[name], **(changes or {})}
    base = replace(published, networks={**published.networks, role: config}).write(folder / "model")
    recipe = recipe_from_mapping(
        "memory",
        {
            "datasets": [{"name": "photos", "path": str(folder / "photos")}],
            "output_dir": str(folder / "out"),
            "model": {"base": str(base)},
            "buckets": {"resolution": size.height, "max_aspect_ratio": 1.0},
            "training": {"lora": {"rank": 16, "alpha": 16.0}, **training},
            "accelerate": {"mixed_precision": "bf16"},
        },
    )
    return Shallow(load_family(base), recipe, size)


def _on(device: str, value: Any) -> Any:
    """Return a condition of the forecast with values: those of meta tensors are zeros."""
    if not isinstance(value, Tensor):
        return value
    return torch.zeros_like(value, device=device) if value.is_meta else value.to(device)
