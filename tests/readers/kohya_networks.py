"""LoRA files read by the networks of kohya's tools, sd-scripts and musubi-tuner, which share their form.

A network finds the layers of a model by class names and paths, and merges a file into their weights. The
model is the tool's own at its published size, without memory. Its layers get the sizes of the tiny model and
weights of zero, so that a merged weight is the file's delta weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.readers.readings import Reading

Tensors = dict[str, Tensor]

Merge = Callable[[Tensors], Any]
"""Function that creates the tool's network from a file's tensors, merges them, and returns the network."""


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model without memory."""
    with torch.device("meta"):
        return make()


def set_sizes(model: nn.Module, originals: Mapping[str, Tensor]) -> None:
    """Replace the layers that have weights in `originals` by layers of these sizes with weights of zero."""
    for name, weight in originals.items():
        path, _, kind = name.rpartition(".")
        parent, _, child = path.rpartition(".")
        layer = _submodule(model, path)
        if kind == "weight" and isinstance(layer, nn.Linear | nn.Conv2d):
            setattr(model.get_submodule(parent), child, _zero_layer(weight))


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _zero_layer(weight: Tensor) -> nn.Module:
    """Return a linear layer or convolution with a weight of this shape."""
    if weight.ndim == 2:
        layer: nn.Module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    else:
        layer = nn.Conv2d(weight.shape[1], weight.shape[0], (weight.shape[2], weight.shape[3]), bias=False)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    return layer


def reading(models: Mapping[str, nn.Module], tensors: Tensors, merge: Merge) -> Reading:
    """Return what a network does with a file.

    Args:
        models: Denoiser and text encoders by the prefix of their weights' names.
        tensors: Contents of the file.
        merge: Merges a file into these models.
    """
    names = {
        module: f"{prefix}{path}.weight"
        for prefix, model in models.items()
        for path, module in model.named_modules()
    }
    network = merge(tensors)

    deltas: Tensors = {}
    targets: dict[str, str] = {}
    for lora in [*network.text_encoder_loras, *network.unet_loras]:
        name = names[lora.org_module]
        targets[lora.lora_name] = name
        deltas[name] = lora.org_module.weight.detach().float().flatten(1)
    return Reading(deltas, targets, frozenset(names.values()))
