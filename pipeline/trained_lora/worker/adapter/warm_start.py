"""An adapter that begins as an existing LoRA file, of any of the three layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from pipeline.errors import TrainingError, counted, verb
from pipeline.trained_lora.export.lora_files import (
    ADAPTER_METADATA_KEY,
    LAYOUTS,
    Layout,
    LoraFile,
    LoraModule,
    factors,
    module_scale,
    stored_magnitudes,
)
from pipeline.trained_lora.worker.adapter.lora import Networks, load_networks_state, row_lengths

WHERE = "training.lora.start_from"
_UPS = (".lora_B.weight", ".lora_up.weight")
_LENGTHS = (".lora_magnitude_vector", ".dora_scale")
"""Ends of the keys of up matrices, and of DoRA's lengths."""


def warm_start(networks: Networks, modules: list[LoraModule], path: Path) -> None:
    """Give the adapters the weights of a file, so that they do what the file does.

    A scale other than the adapter's own is put into the up matrices. Nothing of the file is left out but
    modules whose up matrix is all zeros, which do nothing, and no weight stays as it was.

    Args:
        networks: With adapters.
        modules: All that have one.
        path: A LoRA file in one of the layouts of `lora_files`, of any number format.

    Raises:
        TrainingError: The file cannot be read, or is of other modules, ranks or kind than the adapter.
    """
    file = _read(path)
    layout = _layout(file, modules)
    file = _without_idle(file, modules, layout)
    _require_same(file, modules, layout)
    state: dict[str, Tensor] = {}
    for module in modules:
        down, up = factors(file.tensors, module, layout)
        scale = _scale(file, module, layout) * module.rank / module.alpha
        state[f"{module.name}.lora_A.weight"] = down.contiguous()
        state[f"{module.name}.lora_B.weight"] = up.contiguous() if scale == 1.0 else up * scale
    magnitudes = {module.name: module for module in modules if module.magnitude}
    for name, module in magnitudes.items():
        shape = module.shapes("diffusers")[module.magnitude_key("diffusers")]
        state[f"{name}.lora_magnitude_vector"] = (
            stored_magnitudes(file.tensors, module, layout).reshape(shape).clone()
        )
    load_networks_state(networks, state)
    if magnitudes and layout == "comfyui":  # whose lengths are for rows of the base weight
        for name, (before, after) in row_lengths(networks[""]).items():
            stored = state[f"{name}.lora_magnitude_vector"]
            stored *= (after / before).reshape(stored.shape)
        load_networks_state(networks, state)


def _read(path: Path) -> LoraFile:
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = dict(opened.metadata() or {})
        tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError, ValueError) as err:
        fix = "name a .safetensors file of a LoRA"
        raise TrainingError(
            f"the LoRA to start from cannot be read: {err}", where=str(path), fix=fix
        ) from err
    return LoraFile(path, 0, 0, metadata, cast("Any", tensors))


def _layout(file: LoraFile, modules: list[LoraModule]) -> Layout:
    """The layout whose keys the file has most of."""
    known = {
        layout: sum(key in file.tensors for module in modules for key in module.keys(layout)[:2])
        for layout in LAYOUTS
    }
    return max(LAYOUTS, key=known.__getitem__)


def _without_idle(file: LoraFile, modules: list[LoraModule], layout: Layout) -> LoraFile:
    """The file without the modules that have no adapter here and whose up matrix is zero.

    Kohya's tools adapt every layer of a text encoder, and those after the last that is asked learn nothing.
    """
    asked = {key for module in modules for key in module.keys(layout) if key is not None}
    idle = {
        key.removesuffix(end)
        for key, tensor in file.tensors.items()
        for end in _UPS
        if key.endswith(end) and key not in asked and not tensor.any()
    }
    idle -= {key.rsplit(".", 1)[0] for key in file.tensors if key.endswith(_LENGTHS)}
    tensors = {
        key: tensor
        for key, tensor in file.tensors.items()
        if not any(key.startswith(f"{name}.") for name in idle)
    }
    return replace(file, tensors=tensors)


def _require_same(file: LoraFile, modules: list[LoraModule], layout: Layout) -> None:
    shapes = {key: shape for module in modules for key, shape in module.shapes(layout).items()}
    found = {key: tuple(tensor.shape) for key, tensor in file.tensors.items()}
    odd = {key: f"{shapes.get(key, 'nothing')} asked, {found.get(key, 'nothing')} found" for key in found}
    odd |= {key: f"{shape} asked, nothing found" for key, shape in shapes.items() if key not in found}
    wrong = [
        f"{key}: {said}"
        for key, said in sorted(odd.items())
        if shapes.get(key) != found.get(key) and not key.endswith(".alpha")
    ]
    if wrong:
        shown = "\n".join(wrong[:5])
        what = counted(len(wrong), "tensor") + " of the LoRA to start from "
        what += f"{verb(len(wrong), 'is', 'are')} not as this adapter has them, read as {layout}"
        fix = (
            "set rank, modules, kind and text_encoders of training.lora to the file's, or start from another"
        )
        raise TrainingError(what, where=f"{WHERE}: {file.path}\n{shown}", fix=fix)


def _scale(file: LoraFile, module: LoraModule, layout: Layout) -> float:
    """By the file's alpha; where it says none, 1: its factors are what is to be added."""
    alpha = module.keys(layout)[2]
    said = ADAPTER_METADATA_KEY in file.metadata if alpha is None else alpha in file.tensors
    return module_scale(file, module, layout) if said else 1.0
