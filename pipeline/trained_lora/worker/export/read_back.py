"""Verification of exported files: diffusers' own loader, and the comparison with the adapter in memory."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from pipeline.errors import TrainingError, counted
from pipeline.trained_lora.worker.adapter.lora import Adapted, Networks, has_magnitude, lora_modules
from pipeline.trained_lora.worker.export.layouts import DEFECT_FIX, LoraWeights, ModuleWeights, RowNorms

_RELOADED = "reloaded"
"""peft's name of the adapter that is read back."""


def loaded_weights(
    path: Path, pipeline: Any, networks: Networks, norms: RowNorms, *, denoiser_name: str, empty: Any = None
) -> LoraWeights:
    """Return the weights of a file as diffusers loads it, into networks without memory for base weights.

    The file is in the layout of diffusers or kohya. `norms` are the row norms of the exported adapter, and
    `denoiser_name` is "unet" or "transformer". `empty` is the `empty_copy` of the denoiser, which is left as
    it was; None creates one.

    Raises:
        TrainingError: diffusers cannot load the file.
    """
    denoiser = empty_copy(networks[""]) if empty is None else empty
    skeletons = {
        # transformers' classmethod is private in name, but it is what its auto classes call.
        prefix: empty_copy(network, "_from_config") if prefix else denoiser
        for prefix, network in networks.items()
    }
    try:
        # UNet pipelines return (state, alphas, metadata), as FLUX.1 on request; the rest (state, metadata).
        can_have_alphas = "return_alphas" in inspect.signature(pipeline.lora_state_dict).parameters
        state, *alphas, metadata = pipeline.lora_state_dict(
            path.parent,
            weight_name=path.name,
            unet_config=denoiser.config,
            return_lora_metadata=True,
            **({"return_alphas": True} if can_have_alphas else {}),
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
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as err:
        denoiser.unload_lora()
        raise TrainingError(
            f"diffusers cannot load the file: {err}", where=str(path), fix=DEFECT_FIX
        ) from err

    weights = {
        f"{prefix}{name}": _module_weights(module, norms.get(f"{prefix}{name}"))
        for prefix, skeleton in skeletons.items()
        for name, module in lora_modules(skeleton)
        if _RELOADED in module.r
    }
    denoiser.unload_lora()
    return weights


def _module_weights(module: Adapted, norms: tuple[Tensor, Tensor] | None) -> ModuleWeights:
    layer = cast("Any", module)
    down, up = (side[_RELOADED].weight.detach().float() for side in (layer.lora_A, layer.lora_B))
    rows = None
    if norms is not None and has_magnitude(module, _RELOADED):
        rows = layer.lora_magnitude_vector[_RELOADED].weight.detach().float().flatten() / norms[1]
    return ModuleWeights(down.flatten(1), up.flatten(1), float(layer.scaling[_RELOADED]), rows)


def empty_copy(network: nn.Module, constructor: str = "from_config") -> Any:
    """Return a network of the same configuration, with expanded views of a single zero as weights."""
    with torch.device("meta"):
        skeleton = getattr(type(network), constructor)(cast("Any", network).config)
    for module in skeleton.modules():
        for name, weight in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(_expanded_zero(weight), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, _expanded_zero(buffer))
    return skeleton


def _expanded_zero(tensor: Tensor) -> Tensor:
    # diffusers converts a text encoder's adapter to the dtype of the encoder, which would round it.
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.zeros((), dtype=dtype).expand(tensor.shape)


def largest_error(
    path: Path, weights: LoraWeights, expected: LoraWeights, *, exact: bool, tolerance: float
) -> float:
    """Return the largest error of a file's modules, see `module_error`.

    `weights` are what a reader of the file gets. With `exact`, it uses the factors as they are, so that each
    number must be the trained one.

    Raises:
        TrainingError: An error exceeds the tolerance, a factor differs although `exact` is set, or the file
            has other modules.
    """
    if set(expected) != set(weights):
        unmatched = sorted(set(expected) ^ set(weights))
        raise TrainingError(
            f"{counted(len(unmatched), 'module is', 'modules are')} not in both the file and the "
            f"adapter, the first is {unmatched[0]}",
            where=str(path),
            fix=DEFECT_FIX,
        )

    largest = 0.0
    for name, trained in expected.items():
        if exact and not _same_factors(weights[name], trained):
            raise TrainingError(
                f"the factors of {name} in the file differ from the trained ones",
                where=str(path),
                fix=DEFECT_FIX,
            )
        error = module_error(weights[name], trained)
        require_tolerable(name, error, where=path, tolerance=tolerance)
        largest = max(largest, error)
    return largest


def require_tolerable(module: str, error: float, *, where: Path, tolerance: float) -> None:
    """Raise `TrainingError` if a module's relative error exceeds the tolerance or is NaN."""
    # Not `error > tolerance`, which is false for NaN.
    if not error <= tolerance:
        raise TrainingError(
            f"the LoRA of {module} in the file differs from the trained one by {error:.2g} of its size",
            where=str(where),
            fix=DEFECT_FIX,
        )


def module_error(actual: ModuleWeights, expected: ModuleWeights) -> float:
    """Return the relative error of a module's effect; zero if factors, scale and row factors are equal."""
    if (len(actual.up), actual.down.shape[1]) != (len(expected.up), expected.down.shape[1]):
        return math.inf

    # A product takes hundreds of times as long as the comparison, and a large model has hundreds of modules.
    # Different factors may still have the trained product, because diffusers moves a scale into them.
    if _same_factors(actual, expected):
        error = abs(actual.scale / expected.scale - 1.0)
    else:
        error = _product_error(actual, expected)

    if (actual.row_factors is None) != (expected.row_factors is None):
        return math.inf
    if actual.row_factors is not None and expected.row_factors is not None:
        error = max(error, relative_difference(actual.row_factors, expected.row_factors))
    return error


def _same_factors(actual: ModuleWeights, expected: ModuleWeights) -> bool:
    return torch.equal(actual.down, expected.down) and torch.equal(actual.up, expected.up)


def _product_error(actual: ModuleWeights, expected: ModuleWeights) -> float:
    """Return the Frobenius norm of the difference of two products, relative to the terms of `expected`.

    A product is the sum of `rank` matrices, each a column of `up` times a row of `down`.
    """
    # The difference is also a product, L R with L = [s up, -s' up'] and R = [down; down']. Its squared norm
    # is the sum over (L^T L) * (R R^T), two matrices as small as the ranks.
    left = torch.cat([actual.scale * actual.up.double(), -expected.scale * expected.up.double()], dim=1)
    right = torch.cat([actual.down.double(), expected.down.double()])
    squared_error = float(((left.T @ left) * (right @ right.T)).sum())

    # Rounding errors are relative to the terms, which may cancel each other in the sum.
    terms = abs(expected.scale) * expected.up.double().norm(dim=0) * expected.down.double().norm(dim=1)

    # Rounding may make the square of a tiny error negative.
    return math.sqrt(abs(squared_error)) / (float(terms.norm()) or 1.0)


def relative_difference(actual: Tensor, expected: Tensor, *, least_scale: float = 0.0) -> float:
    """Return the largest absolute difference, relative to the larger of max |expected| and `least_scale`."""
    scale = max(float(expected.abs().max()), least_scale) or 1.0
    return float((actual.reshape(expected.shape) - expected).abs().max()) / scale
