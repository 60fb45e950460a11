"""OFT's files: their tensors, and what their readers get from them.

`pipeline.trained_lora.export.lora_files` describes the layouts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import OFTConfig, get_peft_config, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pipeline.errors import TrainingError
from pipeline.trained_lora.export.lora_files import ADAPTER_METADATA_KEY, ROTATION, Layout, LoraModule
from pipeline.trained_lora.worker.adapter.lora import ADAPTER, add_adapter, lora_modules
from pipeline.trained_lora.worker.export.layouts import DEFECT_FIX, read_same_tensors
from pipeline.trained_lora.worker.export.read_back import relative_difference, require_tolerable


def rotation_tensors(
    layout: Layout, modules: list[LoraModule], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a file; `state` has the rotations under peft's names."""
    return {module.rotation_key(layout): state[f"{module.name}{ROTATION}"] for module in modules}


def file_rotations(path: Path, modules: list[LoraModule], layout: Layout) -> dict[str, Tensor]:
    """Return the rotations in a file by module.

    Raises:
        TrainingError: The file cannot be read, or its keys or shapes differ from the modules'.
    """
    tensors = read_same_tensors(path, modules, layout)
    return {module.name: tensors[module.rotation_key(layout)] for module in modules}


def load_rotations(path: Path, denoiser: Any, *, denoiser_name: str) -> None:
    """Add the adapter in a file of the diffusers layout to a denoiser, as a user does with peft.

    Raises:
        TrainingError: peft cannot load the file.
    """
    prefix = f"{denoiser_name}."
    try:
        with safe_open(path, framework="pt") as file:
            settings = json.loads(file.metadata()[ADAPTER_METADATA_KEY])
            weights = {key.removeprefix(prefix): file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118
        config = get_peft_config({key.removeprefix(prefix): value for key, value in settings.items()})
        add_adapter(denoiser, cast("OFTConfig", config))
        loaded = set_peft_model_state_dict(denoiser, weights, adapter_name=ADAPTER)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as err:
        raise TrainingError(f"peft cannot load the file: {err}", where=str(path), fix=DEFECT_FIX) from err
    if loaded.unexpected_keys:
        what = f"peft does not load {loaded.unexpected_keys[0]}"
        raise TrainingError(what, where=str(path), fix=DEFECT_FIX)


def rotation_error(
    path: Path, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, tolerance: float
) -> float:
    """Return the largest relative error of the rotations' numbers.

    Raises:
        TrainingError: An error exceeds the tolerance, or a module is missing or unexpected.
    """
    if unmatched := sorted({*actual} ^ {*expected}):
        what = f"{unmatched[0]} is not in both the file and the adapter"
        raise TrainingError(what, where=str(path), fix=DEFECT_FIX)
    largest = 0.0
    for name, weight in expected.items():
        error = relative_difference(actual[name].float(), weight)
        require_tolerable(name, error, where=path, tolerance=tolerance)
        largest = max(largest, error)
    return largest


@torch.no_grad()
def rotations(network: nn.Module) -> dict[str, Tensor]:
    """Return the numbers of each module's rotation: float32 on the CPU."""
    modules: list[tuple[str, Any]] = list(lora_modules(network))
    return {name: module.oft_R[ADAPTER].weight.detach().float().cpu() for name, module in modules}


@torch.no_grad()
def rotation_matrices(network: nn.Module) -> dict[str, Tensor]:
    """Return R - I of the first module of each block size, computed by peft: float32 on the CPU."""
    first: dict[tuple[int, ...], tuple[str, Any]] = {}
    modules: list[tuple[str, Any]] = list(lora_modules(network))
    for name, module in modules:
        first.setdefault(tuple(module.oft_R[ADAPTER].weight.shape), (name, module))
    matrices = {name: module.get_delta_weight(ADAPTER).float().cpu() for name, module in first.values()}
    return {name: matrix - torch.eye(len(matrix)) for name, matrix in matrices.items()}
