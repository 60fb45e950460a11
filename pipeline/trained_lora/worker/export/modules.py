"""The adapted modules of a model and their names in each layout."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from peft.tuners.oft import OFTLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from pipeline.errors import TrainingError
from pipeline.trained_lora.export.lora_files import LoraModule
from pipeline.trained_lora.worker.adapter.lora import (
    ADAPTER,
    Adapted,
    Networks,
    has_magnitude,
    lora_modules,
)
from pipeline.trained_lora.worker.adapter.to_lora import lora_shapes

if TYPE_CHECKING:
    from pipeline.models.families.parts.lora_keys import Layer
    from pipeline.models.worker.family import WorkerFamily


def describe_networks(family: WorkerFamily, networks: Networks) -> list[LoraModule]:
    """Return the adapted modules of the denoiser and of the text encoders.

    Raises:
        FamilyError: A layout does not define a name for a module.
        TrainingError: kohya's layout fuses modules, but their adapters cannot be fused.
    """
    # Unless a text encoder is trained, the base model's text encoders may be missing.
    text_encoders = family.trainable_text_encoders() if len(networks) > 1 else {}
    described: list[LoraModule] = []
    for prefix, network in networks.items():
        if not prefix:
            described += describe_denoiser(family, network)
            continue
        role = prefix.removesuffix(".")
        for name, module in lora_modules(network):
            diffusers, kohya, comfyui = text_encoders[role].keys(role, name)
            described.append(
                _describe(f"{prefix}{name}", module, diffusers=diffusers, kohya=kohya, comfyui=comfyui)
            )
    return described


def describe_denoiser(family: WorkerFamily, denoiser: nn.Module) -> list[LoraModule]:
    """Return the denoiser's adapted modules."""
    described: list[LoraModule] = []
    for name, module in lora_modules(denoiser):
        layer = family.kohya_layer(name)
        key = f"{family.spec.denoiser_name}.{name}"
        alone = _describe(name, module, diffusers=key, kohya=layer.key, comfyui=family.comfyui_key(name))
        if alone.rotation:
            described.append(alone)  # no file of a rotation has kohya's layers
            continue
        part, outs = layer.modules.index(name), fused_outs(denoiser, layer)
        described.append(replace(alone, kohya_part=part, kohya_outs=outs))
    return _with_kohya_ranks(described)


def _describe(name: str, module: Adapted, *, diffusers: str, kohya: str, comfyui: str) -> LoraModule:
    """Return the module as a layer that kohya's layout does not fuse."""
    if isinstance(module, OFTLayer):
        # Rotated layers are linear, see `require_rotatable`.
        layer = cast("nn.Linear", module.get_base_layer())
        num_blocks = int(module.r[ADAPTER])
        return LoraModule(
            name=name,
            diffusers=diffusers,
            kohya=kohya,
            comfyui=comfyui,
            in_features=layer.in_features,
            out_features=layer.out_features,
            rank=num_blocks,
            alpha=float(num_blocks),
            rotation=True,
        )
    down, up = lora_shapes(module)

    # Readers scale by alpha / rank. peft's own alpha gives another scale with rsLoRA or a converted adapter.
    return LoraModule(
        name=name,
        diffusers=diffusers,
        kohya=kohya,
        comfyui=comfyui,
        in_features=down[1],
        out_features=up[0],
        rank=down[0],
        alpha=float(cast("Any", module).scaling[ADAPTER]) * down[0],
        kernel=down[2:],
        magnitude=has_magnitude(module),
    )


def fused_outs(denoiser: nn.Module, layer: Layer) -> tuple[int, ...]:
    """Return the rows of each part of a layer of kohya's layout; empty if one module is the entire layer.

    Raises:
        AttributeError: The model lacks a part.
    """
    outs = tuple(_out_features(denoiser, part) for part in layer.modules)
    return outs if len(outs) > 1 else ()


def _out_features(denoiser: nn.Module, path: str) -> int:
    # Not from the weight's shape, because bitsandbytes packs weights into columns of bytes.
    module = denoiser.get_submodule(path)
    base = cast("Any", module.get_base_layer() if isinstance(module, BaseTunerLayer) else module)
    return int(base.out_channels if isinstance(base, nn.Conv2d) else base.out_features)


def _with_kohya_ranks(modules: list[LoraModule]) -> list[LoraModule]:
    """Return the modules with `kohya_ranks`, for layers whose parts have different ranks."""
    parts: defaultdict[str, list[LoraModule]] = defaultdict(list)
    for module in modules:
        if module.kohya_outs:
            parts[module.kohya].append(module)

    ranks: dict[str, tuple[int, ...]] = {}
    for key, fused in parts.items():
        _require_fusible(fused)
        by_part = {module.kohya_part: module.rank for module in fused}
        if len(set(by_part.values())) > 1:
            ranks[key] = tuple(by_part.get(part, 0) for part in range(len(fused[0].kohya_outs)))
    return [replace(module, kohya_ranks=ranks.get(module.kohya, ())) for module in modules]


def _require_fusible(parts: list[LoraModule]) -> None:
    first = parts[0]
    for module in parts:
        # A layer of the file has one alpha.
        if not math.isclose(module.alpha / module.rank, first.alpha / first.rank, rel_tol=1e-6):
            raise TrainingError(
                f"the parts of kohya's layer {module.kohya} must have one alpha / rank, "
                f"but {module.name} differs",
                where="training.lora.ranks",
                fix="match all of its parts with the same entry of training.lora.ranks, or set the same "
                "alpha / rank for them",
            )

        # The magnitudes of a part without an adapter would be zero, and so would its weights.
        if module.magnitude and len(parts) < len(module.kohya_outs):
            raise TrainingError(
                f"DoRA needs an adapter on every part of kohya's layer {module.kohya}, "
                f"not only on {module.name}",
                where="training.lora.modules",
                fix="match query, key and value together in training.lora.modules, or set dora: false",
            )
