"""Warm start: initialising the adapter from an existing LoRA file in any of the three layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from pipeline.errors import TrainingError, counted
from pipeline.trained_lora.export.lora_files import (
    ADAPTER_METADATA_KEY,
    LAYOUTS,
    RUN_KEY,
    Layout,
    LoraFile,
    LoraModule,
    factors,
    is_magnitude,
    module_scale,
    stored_magnitudes,
    unfolded,
)
from pipeline.trained_lora.worker.adapter.fused_layers import partly_adapted, with_separate_parts
from pipeline.trained_lora.worker.adapter.lora import Networks, load_networks_state, row_norms

_KEY = "training.lora.start_from"

_MAX_LISTED_TENSORS = 5

_UP_ENDINGS = (".lora_B.weight", ".lora_up.weight")
"""Endings of the keys of up matrices."""


def warm_start(networks: Networks, modules: list[LoraModule], path: Path) -> None:
    """Load a LoRA file into the adapters, so that they have the same effect as the file.

    The file may be in any of the layouts of `lora_files`, and of any float dtype. Modules of the file without
    an adapter are ignored only if their up matrix is zero. A layer that combines several modules may have a
    dense LoRA; then its rank must be the adapter's.

    Raises:
        TrainingError: The file is not readable, or its modules, ranks or kind differ from the adapter's.
    """
    file = _read(path)
    layout = _detect_layout(file, modules)
    file = with_separate_parts(without_zero_modules(file, modules, layout), modules, layout)
    _require_same_tensors(file, modules, layout)
    load_lora_tensors(networks, modules, file, layout)


def load_lora_tensors(networks: Networks, modules: list[LoraModule], file: LoraFile, layout: Layout) -> None:
    """Replace every weight of the adapters by the tensors of a file with the same modules, ranks and kind."""
    state: dict[str, Tensor] = {}
    for module in modules:
        down, up = factors(file.tensors, module, layout)

        # The recipe fixes the adapter's scale, so the factors absorb the difference to the file's scale. For
        # files of `Exporter`, this restores the trained factors.
        scale = file_scale(file, module, layout) * module.rank / module.alpha
        if scale != 1.0:
            is_folded = layout != "diffusers" and RUN_KEY in file.metadata
            down, up = unfolded(down, up, scale) if is_folded else (down, up * scale)
        state[f"{module.name}.lora_A.weight"] = down.contiguous()
        state[f"{module.name}.lora_B.weight"] = up.contiguous()

    dora_modules = [module for module in modules if module.magnitude]
    for module in dora_modules:
        shape = module.shapes("diffusers")[module.magnitude_key("diffusers")]
        stored = stored_magnitudes(file.tensors, module, layout)
        state[f"{module.name}.lora_magnitude_vector"] = stored.reshape(shape).clone()
    load_networks_state(networks, state)

    # ComfyUI's magnitudes refer to the base weight's rows. Converting them needs the adapted rows, and so the
    # factors loaded above.
    if dora_modules and layout == "comfyui":
        for name, (base_norms, adapted_norms) in row_norms(networks[""]).items():
            magnitude = state[f"{name}.lora_magnitude_vector"]
            magnitude *= (adapted_norms / base_norms).reshape(magnitude.shape)
        load_networks_state(networks, state)


def read_lora_tensors(path: Path) -> LoraFile:
    """Return the metadata of a LoRA file and its tensors as float32.

    Raises:
        OSError: The file cannot be read.
        SafetensorError: It is not a safetensors file.
        ValueError: It has a dtype that torch lacks.
    """
    with safe_open(path, framework="pt") as opened:
        metadata = dict(opened.metadata() or {})
    tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    return LoraFile(path, 0, 0, metadata, cast("Any", tensors))


def _read(path: Path) -> LoraFile:
    try:
        return read_lora_tensors(path)
    except (OSError, SafetensorError, ValueError) as err:
        raise TrainingError(
            f"the LoRA to start from cannot be read: {err}",
            where=f"{_KEY}: {path}",
            fix="set it to a .safetensors file of a LoRA",
        ) from err


def _detect_layout(file: LoraFile, modules: list[LoraModule]) -> Layout:
    """Return the layout with the most matching keys."""
    num_matches = {
        layout: sum(key in file.tensors for module in modules for key in module.keys(layout)[:2])
        for layout in LAYOUTS
    }
    return max(LAYOUTS, key=num_matches.__getitem__)


def without_zero_modules(file: LoraFile, modules: list[LoraModule], layout: Layout) -> LoraFile:
    """Return the file without the modules that have no adapter here and a zero up matrix."""
    # kohya's tools adapt all layers of a text encoder, and the layers after its output learn nothing.
    adapter_keys = {key for module in modules for key in module.keys(layout) if key is not None}
    zero_modules = {
        key.removesuffix(ending)
        for key, tensor in file.tensors.items()
        for ending in _UP_ENDINGS
        if key.endswith(ending) and key not in adapter_keys and not tensor.any()
    }

    # DoRA's magnitudes change the weight even if the up matrix is zero.
    zero_modules -= {key.rsplit(".", 1)[0] for key in file.tensors if is_magnitude(key)}
    tensors = {
        key: tensor
        for key, tensor in file.tensors.items()
        if not any(key.startswith(f"{name}.") for name in zero_modules)
    }
    return replace(file, tensors=tensors)


def _require_same_tensors(file: LoraFile, modules: list[LoraModule], layout: Layout) -> None:
    """Raise `TrainingError` unless file and adapter have the same tensors; alphas may be missing or extra."""
    adapter_shapes = {key: shape for module in modules for key, shape in module.shapes(layout).items()}
    file_shapes = {key: tuple(tensor.shape) for key, tensor in file.tensors.items()}
    mismatches = [
        f"{key}: the adapter has {adapter_shapes.get(key, 'no such tensor')}, "
        f"the file {file_shapes.get(key, 'no such tensor')}"
        for key in unmatched_keys(file, modules, layout)
    ]
    mismatches += [
        f"{key}: the file also changes parts of this layer that have no adapter"
        for key in partly_adapted(file, modules, layout)
    ]
    if mismatches:
        shown = "\n".join(mismatches[:_MAX_LISTED_TENSORS])
        raise TrainingError(
            f"the LoRA to start from, read in the {layout} layout, has "
            f"{counted(len(mismatches), 'tensor')} that do not match the adapter",
            where=f"{_KEY}: {file.path}\n{shown}",
            fix="set training.lora to the file's rank, modules, kind and text_encoders, or use another file",
        )


def unmatched_keys(file: LoraFile, modules: list[LoraModule], layout: Layout) -> list[str]:
    """Return the sorted keys, without alphas, that file and modules do not share or with different shapes."""
    module_shapes = {key: shape for module in modules for key, shape in module.shapes(layout).items()}
    file_shapes = {key: tuple(tensor.shape) for key, tensor in file.tensors.items()}
    return [
        key
        for key in sorted({*module_shapes, *file_shapes})
        if module_shapes.get(key) != file_shapes.get(key) and not key.endswith(".alpha")
    ]


def file_scale(file: LoraFile, module: LoraModule, layout: Layout) -> float:
    """Return the module's scale from the file's alpha; 1 if the file has none."""
    down_key, _, alpha_key = module.keys(layout)

    # Some trainers add alphas to the layout of diffusers, and diffusers reads them.
    if layout == "diffusers" and (own_alpha := file.tensors.get(f"{module.diffusers}.alpha")) is not None:
        return float(own_alpha) / len(file.tensors[down_key])
    has_alpha = ADAPTER_METADATA_KEY in file.metadata if alpha_key is None else alpha_key in file.tensors
    return module_scale(file, module, layout) if has_alpha else 1.0
