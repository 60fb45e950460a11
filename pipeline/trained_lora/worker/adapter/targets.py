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

_BLOCKS = re.compile(r"(.+_)?blocks|mid_block|layers|.+_refiner|text_fusion")
"""First component of the path of what is repeated, in diffusers' UNets and transformers."""

_ATTENTION = re.compile(r"attn\d*|(.+_)?attention")
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
        wanted = ", ".join(family_targets if settings.targets == "family" else [settings.targets])
        fix = "set training.lora.modules to patterns of this model's layers, such as " + _some(layers)
        raise TrainingError(f"no layer takes an adapter: asked for {wanted}", where=where, fix=fix)
    if settings.conv_rank is not None and not any(is_convolution(layers[name]) for name in chosen):
        what = f"training.lora.conv_rank: the blocks of {type(denoiser).__name__} have no convolutions"
        raise TrainingError(what, where=where, fix="set conv_rank: null; only UNets have them")
    for key, patterns, names in (
        ("modules", settings.modules, list(layers)),
        ("ranks", [each.modules for each in settings.ranks], chosen),
    ):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                what = f"training.lora.{key}: the pattern {pattern} fits no layer"
                raise TrainingError(what, where=where, fix=f"the layers are such as {_some(names)}")
    return chosen


def rank_patterns(
    denoiser: nn.Module, modules: list[str], settings: LoraSettings
) -> tuple[dict[str, int], dict[str, float]]:
    """(ranks, alphas) of the modules whose size is their own, by peft's patterns: each one whole path."""
    sizes: dict[str, tuple[int, float]] = {}
    for name in modules:
        conv = is_convolution(denoiser.get_submodule(name))
        if settings.has_own_size(name, conv=conv):
            sizes[f"^{re.escape(name)}"] = settings.size_of(name, conv=conv)
    return {key: rank for key, (rank, _) in sizes.items()}, {key: alpha for key, (_, alpha) in sizes.items()}


def is_convolution(module: nn.Module) -> bool:
    """Whether it looks at more than one pixel; a convolution of one is a linear layer."""
    return isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1


def _chosen(name: str, module: nn.Module, settings: LoraSettings, family_targets: list[str]) -> bool:
    first, *parts = name.split(".")
    inside = _BLOCKS.fullmatch(first) is not None
    if settings.conv_rank is not None and inside and is_convolution(module):
        return True
    if settings.modules:
        return any(fnmatchcase(name, pattern) for pattern in settings.modules)
    if settings.targets == "family":
        return any(name == target or name.endswith(f".{target}") for target in family_targets)
    inside = inside and isinstance(module, nn.Linear)
    if settings.targets == "attention":
        return inside and any(_ATTENTION.fullmatch(part) for part in parts)
    return inside and not any(_BESIDE.search(part) for part in parts)


def _adaptable(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


def _some(names: Mapping[str, nn.Module] | list[str]) -> str:
    spread = list(names)[:: max(1, len(names) // 4)]
    return ", ".join(spread[:5])
