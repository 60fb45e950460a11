"""Which modules of a denoiser get an adapter, and their ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from pipeline.errors import TrainingError
from pipeline.recipe.lora import oft_block_size
from pipeline.trained_lora.module_patterns import given_patterns, unmatched_error

if TYPE_CHECKING:
    from pipeline.recipe import LoraSettings

_BLOCKS = re.compile(r"(.+_)?blocks|mid_block|layers|.+_refiner|text_fusion|perceiver")
"""First path component of the repeated blocks in diffusers' UNets and transformers."""

_ATTENTION = re.compile(r"attn\d*|(.+_)?attention")
"""Path component of an attention module."""

_CONDITIONING = re.compile(r"norm|mod(ulation)?\b|time|embed", re.IGNORECASE)
"""Part of a path component of layers that carry the timestep into a block, not the image."""


def target_modules(denoiser: nn.Module, settings: LoraSettings, family_targets: list[str]) -> list[str]:
    """Return the dotted paths of the modules that get an adapter, in the model's order.

    `family_targets` are the path endings that `targets: family` selects.

    Raises:
        TrainingError: No module is selected, or a pattern of `modules`, `ranks` or `learning_rates`
            matches none.
    """
    layers = adaptable_layers(denoiser)
    selected = [
        name for name, module in layers.items() if _is_selected(name, module, settings, family_targets)
    ]
    model = type(denoiser).__name__
    where = f"training.lora, {model}"
    # A size or a rate needs a layer that is trained.
    unmatched = [
        (key, pattern)
        for key, pattern in given_patterns(settings)
        if not any(fnmatchcase(name, pattern) for name in (layers if key == "modules" else selected))
    ]
    if unmatched:
        names = list(layers) if unmatched[0][0] == "modules" else selected or list(layers)
        raise unmatched_error(unmatched, names, where=where)
    if not selected:
        wanted = ", ".join(family_targets if settings.targets == "family" else [settings.targets])
        raise TrainingError(
            f"training.lora selects no layer of {model}: it has none that match {wanted}",
            where=where,
            fix=f"set training.lora.modules to patterns of this model's layers, such as {_examples(layers)}",
        )
    if settings.conv_rank is not None and not any(is_convolution(layers[name]) for name in selected):
        raise TrainingError(
            f"training.lora.conv_rank needs convolutions, and the blocks of {model} have none",
            where=where,
            fix="set conv_rank: null; only UNets have convolutions",
        )

    return selected


def rank_patterns(
    denoiser: nn.Module, modules: list[str], settings: LoraSettings
) -> tuple[dict[str, int], dict[str, float]]:
    """Return peft's `rank_pattern` and `alpha_pattern`; each key matches exactly one of `modules`."""
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name in modules:
        conv = is_convolution(denoiser.get_submodule(name))
        if settings.has_own_size(name, conv=conv):
            # peft matches the end of a path, so the anchor keeps a path that ends in this one from matching.
            pattern = f"^{re.escape(name)}"
            ranks[pattern], alphas[pattern] = settings.size_of(name, conv=conv)
    return ranks, alphas


def require_rotatable(network: nn.Module, modules: list[str], settings: LoraSettings) -> None:
    """Raise TrainingError unless OFT can rotate the inputs of all `modules`."""
    for name in modules:
        layer = network.get_submodule(name)
        where = f"training.lora, {type(network).__name__}"
        if not isinstance(layer, nn.Linear):
            # peft rotates overlapping patches and adds them up, unlike the weight that it merges.
            raise TrainingError(
                f"kind: oft needs linear layers, and {name} is a convolution",
                where=where,
                fix="match linear layers only in training.lora.modules, or set kind: lora",
            )
        if oft_block_size(layer.in_features, settings.rotation_block) == 1:
            raise TrainingError(
                f"oft_block_size: {settings.rotation_block} leaves nothing to rotate in {name}: the closest "
                f"divisor of its {layer.in_features} inputs is 1",
                where=where,
                fix="set training.lora.oft_block_size to a divisor of this number",
            )


def is_convolution(module: nn.Module) -> bool:
    """Return whether the module is a convolution over more than one pixel; a 1x1 one is a linear layer."""
    return isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1


def adaptable_layers(network: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return the layers that can have an adapter by dotted path, in the model's order."""
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    }


def _is_selected(name: str, module: nn.Module, settings: LoraSettings, family_targets: list[str]) -> bool:
    first, *parts = name.split(".")
    in_block = _BLOCKS.fullmatch(first) is not None

    # conv_rank adds the blocks' convolutions to any other selection.
    if settings.conv_rank is not None and in_block and is_convolution(module):
        return True
    if settings.modules:
        return any(fnmatchcase(name, pattern) for pattern in settings.modules)
    if settings.targets == "family":
        return any(name == target or name.endswith(f".{target}") for target in family_targets)

    is_block_linear = in_block and isinstance(module, nn.Linear)
    if settings.targets == "attention":
        return is_block_linear and any(_ATTENTION.fullmatch(part) for part in parts)
    return is_block_linear and not any(_CONDITIONING.search(part) for part in parts)


def _examples(names: Iterable[str]) -> str:
    all_names = list(names)
    spread = all_names[:: max(1, len(all_names) // 4)]
    return ", ".join(spread[:5])
