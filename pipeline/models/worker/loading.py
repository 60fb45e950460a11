"""Load the components of a base model with diffusers and transformers."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
from diffusers.utils import logging as diffusers_logging
from torch import nn
from transformers.utils import logging as transformers_logging

from pipeline.models.diffusers_folder import stored_dtype, weight_files, weight_variant
from pipeline.models.families import Family

# Attributes of transformers' language models: parts of a vision encoder, and the layer that computes logits.
_VISION_PARTS = ("visual", "vision_tower", "multi_modal_projector")
_OUTPUT_LAYER = "lm_head"

# Loggers that warn about unused features when diffusers or transformers imports their packages.
_WARNING_ON_IMPORT = ("bitsandbytes", "torchao", "torch.utils._pytree")


def keep_quiet() -> None:
    """Silence the progress bars and hints of diffusers and transformers in this process.

    Call it before the first class of either is imported, which imports other packages that print hints.
    """
    for name in _WARNING_ON_IMPORT:
        logging.getLogger(name).setLevel(logging.ERROR)
    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


def import_base_classes() -> None:
    """Import the base classes of networks and pipelines, which import most of both libraries.

    On a machine with a GPU, they import bitsandbytes if it is installed, which initialises CUDA.
    """
    keep_quiet()
    importlib.import_module("diffusers.pipelines.pipeline_utils")
    importlib.import_module("transformers.modeling_utils")


def import_libraries(*modules: str, without_gpu: Sequence[str] = ()) -> None:
    """Import what a process needs before its job exists, and nothing that uses a GPU.

    `without_gpu` are modules that import the base classes of networks too.
    """
    keep_quiet()
    for name in modules:
        importlib.import_module(name)

    # Counting GPUs does not initialise CUDA.
    if torch.cuda.device_count() == 0:
        import_base_classes()
        for name in without_gpu:
            importlib.import_module(name)


def component_class(family: Family, role: str) -> Any:
    """Return the class that `family.spec.components` names for a component."""
    library, _, name = family.spec.components[role].rpartition(".")
    return getattr(importlib.import_module(library), name)


def pipeline_class(family: Family) -> Any:
    """Return the family's pipeline class of diffusers."""
    return getattr(diffusers, family.spec.pipeline_classes[0])


def load_component(family: Family, role: str, dtype: str, device: str) -> nn.Module:
    """Return a network of `family.spec.components`, frozen and in evaluation mode.

    Raises:
        ModelError: The component's weights are missing.
    """
    return read_component(family, role, dtype).to(device)


def read_text_encoder(family: Family, role: str, dtype: str) -> tuple[nn.Module, torch.dtype | None]:
    """Return a text encoder, and the dtype to convert its weights to; None if they have the right one.

    The encoder is on the CPU, frozen, in evaluation mode and without unused parts.

    Raises:
        ModelError: The component's weights are missing.
    """
    stored = stored_dtype(weight_files(family.model.component(role)))

    # Weights in their stored dtype are memory-mapped, so nothing is read of the parts that are dropped.
    # `move_weights` converts the rest one by one on their way to the device.
    #
    # In float16, transformers keeps T5's overflowing layers in float32.
    is_mapped = dtype != "float16" and stored is not None
    network = read_component(family, role, stored if is_mapped and stored else dtype)
    drop_unused_parts(network, sees_images=family.text_images is not None)
    return network, getattr(torch, dtype) if is_mapped else None


def drop_unused_parts(network: nn.Module, *, sees_images: bool = False) -> None:
    """Remove a language model's output layer, and its vision encoder unless it sees images."""
    # Only hidden states are used.
    for module in list(network.modules()):
        for name in () if sees_images else _VISION_PARTS:
            if isinstance(getattr(module, name, None), nn.Module):
                setattr(module, name, None)
        if isinstance(getattr(module, _OUTPUT_LAYER, None), nn.Module):
            setattr(module, _OUTPUT_LAYER, nn.Identity())


def read_component(family: Family, role: str, dtype: str, **options: Any) -> nn.Module:
    """Return a network on the device where `from_pretrained` puts it; see `load_component`."""
    folder = family.model.component(role)
    options |= {"variant": weight_variant(folder), "dtype": getattr(torch, dtype)}
    if family.spec.components[role].startswith("transformers."):
        options["attn_implementation"] = _attention(family.model.config(role))
    network = component_class(family, role).from_pretrained(folder, local_files_only=True, **options)
    return network.requires_grad_(False).eval()


def _attention(config: Mapping[str, Any]) -> str | None:
    """Return the attention implementation of a text encoder; None means the best one that torch has."""
    stated = config.get("attn_implementation", config.get("_attn_implementation"))

    # A configuration may name any implementation, also code in a repository on the Hub.
    return stated if stated in ("eager", "sdpa") else None


def empty_components(pipeline: Any) -> dict[str, Any]:
    """Return None for every component of a pipeline class, by the name of its constructor's argument."""
    # Settings, unlike components, have defaults other than None.
    parameters = inspect.signature(pipeline.__init__).parameters
    empty = inspect.Parameter.empty
    names = [
        name
        for name, parameter in parameters.items()
        if name != "self" and (parameter.default is empty or parameter.default is None)
    ]
    return dict.fromkeys(names)


def unpacked_weight(network: nn.Module) -> nn.Parameter:
    """Return a weight with the dtype that the network computes in; quantized weights are bytes."""
    return next(weight for weight in network.parameters() if weight.is_floating_point())
