"""Verification of exported files: diffusers' own loader, and the comparison with the adapter in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipeline.errors import TrainingError, counted
from pipeline.trained_lora.worker.adapter.lora import Networks, collect, delta_weights, magnitudes
from pipeline.trained_lora.worker.export.layouts import DEFECT_FIX, Effects, RowNorms, combine_effects

_RELOADED = "reloaded"
"""peft's name of the adapter that is read back."""


def loaded_effects(
    path: Path, pipeline: Any, networks: Networks, norms: RowNorms, *, denoiser_name: str
) -> Effects:
    """Return the effects of a file as diffusers loads it, into networks whose base weights take no memory.

    The file is in the layout of diffusers or kohya. `norms` are the row norms of the exported adapter, and
    `denoiser_name` is "unet" or "transformer".

    Raises:
        TrainingError: diffusers cannot load the file.
    """
    skeletons = {
        # transformers' classmethod is private in name, but it is what its auto classes call.
        prefix: _skeleton(network, "_from_config" if prefix else "from_config")
        for prefix, network in networks.items()
    }
    denoiser = skeletons[""]
    try:
        # UNet pipelines return (state, alphas, metadata), the others (state, metadata).
        state, *alphas, metadata = pipeline.lora_state_dict(
            path.parent, weight_name=path.name, unet_config=denoiser.config, return_lora_metadata=True
        )
        options = {
            "network_alphas": alphas[0] if alphas else None,
            "metadata": metadata,
            "adapter_name": _RELOADED,
        }
        denoiser.load_lora_adapter(state, prefix=denoiser_name, **options)
        for prefix, encoder in skeletons.items():
            if prefix:
                component = prefix.removesuffix(".")
                pipeline.load_lora_into_text_encoder(state, text_encoder=encoder, prefix=component, **options)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as err:
        raise TrainingError(
            f"diffusers cannot load the file: {err}", where=str(path), fix=DEFECT_FIX
        ) from err

    deltas = collect(skeletons, partial(delta_weights, adapter=_RELOADED))
    return combine_effects(deltas, magnitudes(denoiser, _RELOADED), norms)


def _skeleton(network: nn.Module, constructor: str) -> Any:
    """Return a network of the same configuration whose weights are expanded views of a single zero.

    `constructor` names the class method of `network` that takes a configuration.
    """
    with torch.device("meta"):
        skeleton = getattr(type(network), constructor)(cast("Any", network).config)
    for module in skeleton.modules():
        for name, weight in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(_expanded_zero(weight), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, _expanded_zero(buffer))
    return skeleton


def _expanded_zero(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def largest_errors(
    reloaded: Sequence[tuple[Path, Effects]],
    expected: Effects,
    *,
    frozen_sizes: Mapping[str, float],
    tolerance: float,
) -> dict[Path, float]:
    """Return the largest error of each file, relative to the largest value of the effect.

    Args:
        reloaded: Effects of each file; a file may occur twice.
        expected: Effects of the adapter in memory.
        frozen_sizes: Largest delta weight of the frozen adapter by module. Rounding errors are relative to it
            if it is larger, because it cancels most of the trained adapter's delta weight.
        tolerance: Largest allowed error.

    Raises:
        TrainingError: An error exceeds the tolerance, or a file has other modules.
    """
    for path, effects in reloaded:
        if set(expected) != set(effects):
            unmatched = sorted(set(expected) ^ set(effects))
            raise TrainingError(
                f"{counted(len(unmatched), 'module is', 'modules are')} not in both the file and the "
                f"adapter, the first is {unmatched[0]}",
                where=str(path),
                fix=DEFECT_FIX,
            )

    largest = {path: 0.0 for path, _ in reloaded}
    for name in expected:
        for path, error in _relative_errors(name, reloaded, expected, frozen_sizes.get(name, 0.0)):
            if not error <= tolerance:  # also if the error is NaN
                raise TrainingError(
                    f"the delta weight of {name} in the file differs from the trained one by "
                    f"{error:.2g} of its largest value",
                    where=str(path),
                    fix=DEFECT_FIX,
                )
            largest[path] = max(largest[path], error)
    return largest


def _relative_errors(
    name: str, reloaded: Sequence[tuple[Path, Effects]], expected: Effects, frozen_size: float
) -> list[tuple[Path, float]]:
    """Return one effect's error in each file; only two tensors are in memory at a time."""
    tensor = expected[name]()
    scale = max(float(tensor.abs().max()), frozen_size) or 1.0
    return [
        (path, float((tensor - effects[name]().reshape(tensor.shape)).abs().max()) / scale)
        for path, effects in reloaded
    ]
