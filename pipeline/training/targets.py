"""Which modules of a denoiser get an adapter, and of which rank, by the recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from pipeline.errors import TrainingError

if TYPE_CHECKING:
    from pipeline.recipe import LoraSettings

_BLOCKS = re.compile(r"(.+_)?blocks|mid_block|layers|.+_refiner")
"""First component of the path of what is repeated, in diffusers' UNets and transformers."""

_ATTENTION = re.compile(r"attn\d*|attention")
_BESIDE = re.compile(r"norm|mod(ulation)?\b|time|embed", re.IGNORECASE)
"""Of layers that tell a block the time, and not what the picture shows."""


def target_modules(denoiser: nn.Module, settings: LoraSettings, family_targets: list[str]) -> list[str]:
    """Dotted paths of the modules that get an adapter, in the model's order.

    Args:
        denoiser: Without an adapter.
        settings: Says which.
        family_targets: Endings, what `targets: family` stands for.

    Raises:
        TrainingError: There are none; or a pattern of `modules` or `ranks` fits none.
    """
    layers = {name: module for name, module in denoiser.named_modules() if _adaptable(module)}
    chosen = [name for name, module in layers.items() if _chosen(name, module, settings, family_targets)]
    where = f"training.lora, {type(denoiser).__name__}"
    if not chosen:
        wanted = ", ".join(family_targets if settings.family_modules else [settings.targets])
        fix = "set training.lora.modules to patterns of this model's layers, such as " + _some(layers)
        raise TrainingError(f"no layer takes an adapter: asked for {wanted}", where=where, fix=fix)
    for key, patterns, names in (
        ("modules", settings.modules, list(layers)),
        ("ranks", [each.modules for each in settings.ranks], chosen),
    ):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                what = f"training.lora.{key}: the pattern {pattern} fits no layer"
                raise TrainingError(what, where=where, fix=f"the layers are such as {_some(names)}")
    return chosen


def sizes_of(modules: list[str], settings: LoraSettings) -> tuple[dict[str, int], dict[str, float]]:
    """(rank, alpha) of the modules that `ranks` speaks of, by peft's patterns: each one whole path."""
    ruled = [name for name in modules if settings.rule_of(name) is not None]
    sizes = {f"^{re.escape(name)}": settings.size_of(name) for name in ruled}
    return {key: rank for key, (rank, _) in sizes.items()}, {key: alpha for key, (_, alpha) in sizes.items()}


def _chosen(name: str, module: nn.Module, settings: LoraSettings, family_targets: list[str]) -> bool:
    if settings.modules:
        return any(fnmatchcase(name, pattern) for pattern in settings.modules)
    if settings.family_modules:
        return any(name == target or name.endswith(f".{target}") for target in family_targets)
    first, *parts = name.split(".")
    inside = _BLOCKS.fullmatch(first) is not None and isinstance(module, nn.Linear)
    if settings.targets == "attention":
        return inside and any(_ATTENTION.fullmatch(part) for part in parts)
    return inside and not any(_BESIDE.search(part) for part in parts)


def _adaptable(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


def _some(names: Mapping[str, nn.Module] | list[str]) -> str:
    spread = list(names)[:: max(1, len(names) // 4)]
    return ", ".join(spread[:5])
