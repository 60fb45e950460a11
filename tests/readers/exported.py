"""LoRA files of a tiny model in which every module that a file can name has an adapter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from peft import LoraConfig
from torch import Tensor, nn

from demo.tiny_models import TINY
from pipeline.errors import FamilyError
from pipeline.models.families import Family
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.loading import read_text_encoder
from pipeline.trained_lora.export.lora_files import Layout, LoraModule, layout_file
from pipeline.trained_lora.worker.adapter.lora import (
    ADAPTER,
    Networks,
    adapted_networks,
    delta_weights,
    trainable_weights,
)
from pipeline.trained_lora.worker.export.exporter import Exporter
from pipeline.trained_lora.worker.export.modules import describe_networks

RANK, ALPHA = 3, 1.0
"""Unequal, so that a reader that ignores alpha is noticed."""

_FLUX = {"attention_head_dim": 128, "num_attention_heads": 1, "axes_dims_rope": [16, 56, 56]}
_FLUX2 = {**_FLUX, "axes_dims_rope": [32, 32, 32, 32]}

_SDXL_UNET = {
    "block_out_channels": [32, 64, 64],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "attention_head_dim": [2, 4, 4],
    "transformer_layers_per_block": [1, 1, 2],
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Stable Diffusion 1.x and 2.x": {
        "block_out_channels": [32, 32, 64, 64],
        "layers_per_block": 2,
        "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
        "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
    },
    "Stable Diffusion XL": _SDXL_UNET,
    "Kolors": _SDXL_UNET,
    "Stable Diffusion 3 and 3.5": {
        "attention_head_dim": 64,
        "num_attention_heads": 3,
        "caption_projection_dim": 192,
    },
    "FLUX.1 dev": _FLUX,
    "FLUX.1 schnell": _FLUX,
    "FLUX.1 Kontext": _FLUX,
    "FLUX.2 klein": _FLUX2,
    "FLUX.2 dev": _FLUX2,
    "Chroma": _FLUX,
    "Krea 2": {"attention_head_dim": 128, "axes_dims_rope": [32, 48, 48]},
    "Kandinsky 5 (image)": {"model_dim": 128, "axes_dims": [32, 48, 48]},
}
"""Changes that give a tiny denoiser the published levels and heads, where a reader's code depends on them."""

RECIPE = "demo"
"""Name of the recipe, which is part of the files' names."""


@dataclass(frozen=True)
class Exported:
    """A tiny model and the LoRA files of its adapters.

    Attributes:
        family: The model and its family.
        files: Folder with the files of the three layouts; the exporter has reloaded them with diffusers.
        modules: Every adapted module.
        deltas: Delta weight (out, in) of each module, by the module's name.
    """

    family: WorkerFamily
    files: Path
    modules: list[LoraModule]
    deltas: dict[str, Tensor]

    def file(self, layout: Layout) -> Path:
        """Return the file of a layout."""
        return self.files / layout_file(layout, RECIPE)

    def is_default(self, module: LoraModule) -> bool:
        """Return whether the module gets an adapter without `training.lora.modules`."""
        targets = self.family.lora_targets()
        return any(module.name == target or module.name.endswith(f".{target}") for target in targets)


def export(kind: str, folder: Path) -> Exported:
    """Write a tiny model of this kind and its LoRA files below `folder`."""
    model, files = folder / "model", folder / "lora"
    TINY[kind](model)
    family = load_family(model)
    _replace_denoiser(model / family.spec.denoiser_name, PUBLISHED.get(kind, {}))

    networks = _networks(family)
    Exporter(family, RECIPE, {}).export(networks, files)
    deltas = {
        f"{prefix}{name}": delta().detach().flatten(1)
        for prefix, network in networks.items()
        for name, delta in delta_weights(network).items()
    }
    return Exported(family, files, describe_networks(family, networks), deltas)


def _replace_denoiser(component: Path, changes: Mapping[str, Any]) -> None:
    """Replace the denoiser by one with these changes, in which no two rows of weights are equal or zero."""
    config: dict[str, Any] = json.loads((component / "config.json").read_text(encoding="utf-8"))
    network = getattr(diffusers, config["_class_name"]).from_config({**config, **changes})
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(torch.randn(weight.shape, generator=rng))
    network.save_pretrained(component)


def _networks(family: WorkerFamily) -> Networks:
    """Load the denoiser and the text encoders that can be trained, with random adapters."""
    denoiser = family.denoiser.load("float32", "cpu")
    _add_adapter(denoiser, list(nameable_modules(family, denoiser)), seed=1)

    encoders: dict[str, nn.Module] = {}
    for seed, (role, names) in enumerate(family.trainable_text_encoders().items(), start=2):
        encoders[role] = read_text_encoder(family, role, "float32")[0]
        _add_adapter(encoders[role], names.targets("blocks"), seed=seed)
    return adapted_networks(denoiser, encoders)


def nameable_modules(family: Family, denoiser: nn.Module) -> Iterator[str]:
    """Yield the path of each linear layer and convolution that has a name in every layout."""
    for name, module in denoiser.named_modules():
        # peft adapts a grouped convolution only at ranks that its groups divide.
        if isinstance(module, nn.Linear | nn.Conv2d) and getattr(module, "groups", 1) == 1:
            try:
                family.kohya_layer(name)
                family.comfyui_key(name)
            except FamilyError:
                continue
            yield name


def _add_adapter(network: Any, targets: list[str], *, seed: int) -> None:
    """Add an adapter whose delta weights differ from zero."""
    network.requires_grad_(False)
    network.add_adapter(
        LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets),  # pyright: ignore[reportArgumentType]
        adapter_name=ADAPTER,
    )
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in trainable_weights(network):
            weight.copy_(torch.randn(weight.shape, generator=rng))
